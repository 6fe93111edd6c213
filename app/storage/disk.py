"""Detects a full disk, and deletes folders whatever they contain."""

import contextlib
import errno
import os
import secrets
import sqlite3
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from app.contract.regular_files import folder

_POSTGRESQL_DISK_FULL = "53100"
_PATIENCE_SECONDS = 60.0
"""The time limit for deleting a folder, since a process may keep filling it."""
_MAX_FAILED_PASSES = 5
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_full(error: BaseException) -> bool:
    """Whether an error of a file, SQLite or PostgreSQL means that the disk is full."""
    if isinstance(error, DBAPIError):
        error = error.orig or error
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def bytes_used(root: Path) -> int:
    """The bytes that the files below a folder take on the disk; 0 if there is no such folder."""
    used = 0
    for within, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been deleted
                used += Path(within, name).lstat().st_blocks * 512
    return used


def remove_tree(root: Path, *parts: str) -> bool:
    """Deletes a folder and everything in it that permissions allow to delete.

    Args:
        root: a folder; its own path is trusted.
        parts: the path below it. Nothing is deleted if a part of it is a link.

    Another process may still change the folder: folders are opened only through descriptors, so that
    replacing one by a link cannot redirect the deletion. Nested folders are moved to the top before they
    are emptied, so that neither recursion depth nor path length limits the nesting.

    Returns:
        Whether the folder is completely gone.
    """
    until, in_vain = time.monotonic() + _PATIENCE_SECONDS, 0
    name = parts[-1] if parts else root.name
    try:
        with folder(root, *parts[:-1]) if parts else folder(root.parent) as parent:
            while _is_there(name, parent) and time.monotonic() < until and in_vain < _MAX_FAILED_PASSES:
                in_vain = 0 if _remove_once(name, parent) else in_vain + 1
            return not _is_there(name, parent)
    except OSError:  # a link, or no such folder
        return not os.path.lexists(root.joinpath(*parts))


def _remove_once(name: str, parent: int) -> bool:
    """Removes a file, or the first levels of a folder. Returns whether anything was removed."""
    top = _opened(name, parent)
    if top is None:
        return _succeeds(lambda: os.unlink(name, dir_fd=parent))
    try:
        removed = False
        for nested in _delete_files(top):
            inner = _opened(nested, top)
            if inner is None:
                continue
            try:
                for deeper in _delete_files(inner):
                    new = f".removed-{secrets.token_hex(8)}"
                    removed |= _succeeds(partial(os.rename, deeper, new, src_dir_fd=inner, dst_dir_fd=top))
            finally:
                os.close(inner)
            removed |= _succeeds(partial(os.rmdir, nested, dir_fd=top))
    finally:
        os.close(top)
    return _succeeds(lambda: os.rmdir(name, dir_fd=parent)) or removed


def _delete_files(within: int) -> list[str]:
    """Deletes the files of an open folder. Returns the names of the folders in it."""
    found = []
    with contextlib.suppress(OSError), os.scandir(within) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                _succeeds(partial(os.unlink, entry.name, dir_fd=within))
    return found


def _opened(name: str, parent: int) -> int | None:
    """Makes a folder accessible and opens it. Returns its descriptor, or None if it is not a folder."""
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        return _made_accessible(name, parent)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IRWXU)
    return descriptor


def _made_accessible(name: str, parent: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        known = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
        try:
            Path(f"/proc/self/fd/{known}").chmod(stat.S_IRWXU)  # the folder itself, whatever its name is now
        finally:
            os.close(known)
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError:
        return None


def _is_there(name: str, parent: int) -> bool:
    return _succeeds(lambda: os.stat(name, dir_fd=parent, follow_symlinks=False))


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True
