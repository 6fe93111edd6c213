"""The temporary folders of engines: staged files, and copies of adapters."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from app.storage.disk import remove_tree

_PREFIX = "accrue-inference-"
"""The id of the process that made the folder follows."""


def make() -> Path:
    """A new folder of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


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
    returned. They are not linked: the engine can write to its folder."""
    target = Path(tempfile.mkdtemp(prefix="adapter-", dir=folder))
    for path in source.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, target / path.name)
    return target
