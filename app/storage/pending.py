"""Marks files and run directories whose row is being written or deleted, until both agree again.

If the process is killed in between, the mark says that a look is needed: what no row names is to go. Without
a mark nothing is ever removed for want of a row: the database may be another one, or a new one.
"""

from pathlib import Path

_MARK = ".pending-"


def mark(path: Path) -> None:
    """Before the file is made, or the row deleted."""
    _mark_of(path).touch(mode=0o600)


def settle(path: Path) -> None:
    """Once file and row are both there, or both gone."""
    _mark_of(path).unlink(missing_ok=True)


def marked(folder: Path) -> list[str]:
    """The marked names in a folder."""
    return [path.name.removeprefix(_MARK) for path in folder.glob(f"{_MARK}*")]


def _mark_of(path: Path) -> Path:
    return path.with_name(f"{_MARK}{path.name}")
