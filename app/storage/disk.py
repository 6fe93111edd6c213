"""The disk: whether it is full, and folders that are deleted whatever is in them."""

import contextlib
import errno
import os
import sqlite3
import stat
from itertools import count
from pathlib import Path

from sqlalchemy.exc import DBAPIError

_POSTGRESQL_DISK_FULL = "53100"


def is_full(error: BaseException) -> bool:
    """Whether an error of a file, SQLite or PostgreSQL means that the disk is full."""
    if isinstance(error, DBAPIError):
        error = error.orig or error
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def remove_tree(path: Path) -> None:
    """Deletes a folder with all that is in it, as far as permissions allow.

    Folders within folders are moved to the top before they are emptied, so that neither the depth of the
    stack nor the longest path bounds how deep they may lie: a trainer makes what it likes.
    """
    numbers = count()
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        while folders := _without_files(path):
            for folder in folders:
                for inner in _without_files(folder):
                    inner.rename(path / f".removed-{os.getpid()}-{next(numbers)}")
                folder.rmdir()
        path.rmdir()


def _without_files(folder: Path) -> list[Path]:
    """Deletes a folder's files. Returns the folders in it."""
    folder.chmod(stat.S_IRWXU)
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(Path(entry.path))
            else:
                Path(entry.path).unlink(missing_ok=True)
    return found
