"""The temporary folders of engines: staged files, and copies of adapters."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from app.contract.regular_files import create_regular, open_regular, regular_file_names
from app.storage.disk import remove_tree

_PREFIX = "accrue-inference-"
"""The id of the process that made the folder follows."""


def make() -> Path:
    """A new folder of this process, with one for staged files and one for adapters."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    staged_in(folder).mkdir()
    adapters_in(folder).mkdir()
    return folder


def staged_in(folder: Path) -> Path:
    """The folder to which the engine may write."""
    return folder / "staged"


def adapters_in(folder: Path) -> Path:
    """The folder for adapters, which the engine only reads: this process, which is not isolated, writes
    there."""
    return folder / "adapters"


def remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.getuid():
                    remove_tree(folder)


def copy_into(folder: Path, source: Path) -> Path:
    """Copies the files of another folder, except for links, into a new folder within `folder`, which is
    returned.

    Raises:
        OSError: a file cannot be copied.
    """
    target = Path(tempfile.mkdtemp(prefix="adapter-", dir=folder))
    for name in regular_file_names(source.parent, source.name):
        with open_regular(source.parent, source.name, name) as read, create_regular(target / name) as written:
            shutil.copyfileobj(read, written)
    return target
