"""Reads and writes regular files in a folder whose content a trainer may have made; links are never followed.

Code within a trainer could leave a symbolic link, a named pipe or a device where the service expects a file.
Every part of a path below the folder is opened without following links. Uses only the standard library.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 64 * 2**20
"""The largest file that is read at once."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class NotRegular(OSError):
    """The path leads to a link, a pipe or another special file, or to a file that is too large."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ELOOP, "not a regular file", str(path))


@contextmanager
def folder(root: Path, *parts: str) -> Iterator[int]:
    """Opens a folder below `root`, and yields its descriptor.

    Raises:
        NotRegular: a part of the path is a link.
        OSError: the folder does not exist, or is not a folder.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            try:
                within = os.open(part, _FOLDER, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotRegular(root.joinpath(*parts)) from None
                raise
            os.close(descriptor)
            descriptor = within
        yield descriptor
    finally:
        os.close(descriptor)


def make_folders(root: Path, *parts: str) -> None:
    """Creates a folder below `root`, and those above it that do not exist yet.

    Raises:
        NotRegular: a part of the path is a link, or not a folder.
        OSError: a folder cannot be created.
    """
    for depth, part in enumerate(parts):
        with folder(root, *parts[:depth]) as within, suppress(FileExistsError):
            os.mkdir(part, dir_fd=within)
    with folder(root, *parts):
        pass


def open_regular(root: Path, *parts: str) -> BinaryIO:
    """Opens a file below a folder for reading.

    Raises:
        NotRegular: the file or a part of its path is a link, or it is not a regular file.
        OSError: the file does not exist, or cannot be read.
    """
    with folder(root, *parts[:-1]) as within:
        return _opened(within, parts[-1], os.O_RDONLY, root.joinpath(*parts))


def read_regular(root: Path, *parts: str, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Returns the content of a file below a folder; None if the file does not exist.

    Args:
        max_bytes: the largest size that is read.

    Raises:
        NotRegular: the file or a part of its path is a link; or it is not a regular file, or is larger.
    """
    with suppress(FileNotFoundError), open_regular(root, *parts) as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise NotRegular(root.joinpath(*parts))
        return content
    return None


def append_regular(path: Path) -> BinaryIO:
    """Opens a file for appending; creates the file if it does not exist.

    Raises:
        NotRegular: the path is a link or not a file.
    """
    with folder(path.parent) as within:
        return _opened(within, path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, path)


def create_regular(path: Path) -> BinaryIO:
    """Creates a file for writing; an existing file or link at that path is replaced.

    Raises:
        OSError: the file cannot be created.
    """
    with folder(path.parent) as within:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=within)
        return _opened(within, path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, path)


def regular_file_names(root: Path, *parts: str) -> list[str]:
    """The sorted names of the regular files in a folder, without links, folders and special files.

    Raises:
        NotRegular: a part of the path is a link.
        OSError: the folder does not exist.
    """
    with folder(root, *parts) as within, os.scandir(within) as entries:
        return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def _opened(within: int, name: str, flags: int, path: Path) -> BinaryIO:
    try:
        descriptor = os.open(name, flags | _FILE, 0o644, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotRegular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(path)
    return os.fdopen(descriptor, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb")
