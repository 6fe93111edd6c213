"""Marks files and run directories whose row is being written or deleted, until file and row agree again.

If the process is killed in between, the next start of the service checks what is marked and deletes it if
no row refers to it. Unmarked files are never deleted for lack of a row: the folder may belong to another
database.
"""

from pathlib import Path

_MARK = ".pending-"


def mark(path: Path) -> None:
    """Marks a path; to be called before the file is created or the row is deleted."""
    _mark_of(path).touch(mode=0o600)


def settle(path: Path) -> None:
    """Removes the mark; to be called once file and row both exist, or are both gone."""
    _mark_of(path).unlink(missing_ok=True)


def marked(folder: Path) -> list[str]:
    """The marked names in a folder."""
    return [path.name.removeprefix(_MARK) for path in folder.glob(f"{_MARK}*")]


def _mark_of(path: Path) -> Path:
    return path.with_name(f"{_MARK}{path.name}")
