"""The parts of a run directory that the service hands out, and their removal with the job."""

import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import structlog
from fastapi import Response
from pydantic import BaseModel, ValidationError

from app.contract.regular_files import folder as open_folder
from app.contract.regular_files import open_regular, read_regular, regular_file_names
from app.contract.reports import Completions, Operators
from app.settings import Settings
from app.storage import stored_files
from app.storage.disk import remove_tree

log = structlog.get_logger("accrue.service")

Content = TypeVar("Content", bound=BaseModel)

_BLOCK = 2**20
_REPLICA = re.compile(r"replica-\d+")


def model_dir(settings: Settings, job_id: str) -> Path:
    """The folder of a job's model.

    Raises:
        LinkedFolder: it is a link.
        Unavailable: the object storage that has it cannot be used.
    """
    return stored_files.folder_of_run(settings, job_id, "model")


def remove_models(settings: Settings, job_id: str) -> None:
    """Deletes the files of a job's model, of its exports, and of its replicas' models."""
    with suppress(OSError), open_folder(settings.runs_dir, job_id) as run, os.scandir(run) as entries:
        names = [entry.name for entry in entries]
        for replica in filter(_REPLICA.fullmatch, names):
            remove_tree(settings.runs_dir, job_id, replica, "model")
    remove_tree(settings.runs_dir, job_id, "model")
    remove_tree(settings.runs_dir, job_id, "exports")
    stored_files.remove_stored_models(settings, job_id)


def completions(settings: Settings, job_id: str) -> Completions:
    """How the job's model completes held-out prompts; empty until it has done so."""
    found = _read(settings, Completions, job_id, "completions.json")
    return Completions(data=()) if found is None else found


MAX_MODEL_FILES = 100
"""The maximum number of files of a model that can be downloaded: each stays open during the download."""
_MAX_JSON_BYTES = 2**22
"""The maximum size of a file that is returned as JSON."""

PROFILE_FILES = ("trace.json", "memory.pickle")
"""The files of a profile that can be downloaded."""


def operators(settings: Settings, job_id: str) -> Operators | None:
    """The operators of the profiled window, or None if no window has been profiled yet."""
    return _read(settings, Operators, job_id, "profile", "operators.json")


def profile_files(settings: Settings, job_id: str) -> list[str]:
    """The names of the downloadable profile files that exist."""
    there = []
    for name in PROFILE_FILES:  # the folder itself may have many others
        with suppress(OSError):
            open_regular(stored_files.path_of_run(settings, job_id, "profile"), "profile", name).close()
            there.append(name)
    return there


def profile_file(settings: Settings, job_id: str, name: str) -> BinaryIO | None:
    """Opens a file of a profile; None if it does not exist or is not one of `PROFILE_FILES`."""
    if name not in profile_files(settings, job_id):
        return None
    with suppress(OSError):
        return open_regular(stored_files.path_of_run(settings, job_id, "profile"), "profile", name)
    return None


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """Reads an open file block by block, then closes it."""
    with file:
        while block := file.read(_BLOCK):
            yield block


def model_files(
    settings: Settings, job_id: str, named: Collection[str], replica: int | None = None
) -> dict[str, BinaryIO] | None:
    """Opens the files of a job's model, so that they can be read to the end even if the folder is deleted.
    Returns them by name, or None if they cannot be opened.

    Args:
        named: the names in the job's result; other files of the folder are not opened.
        replica: the independent replica whose model it is; None for the job's own.
    """
    parts = ("model",) if replica is None else (f"replica-{replica}", "model")
    return open_files(stored_files.path_of_run(settings, job_id, *parts), parts, named)


def open_files(root: Path, folder: Sequence[str], named: Collection[str]) -> dict[str, BinaryIO] | None:
    """Like `model_files`, for any folder below a root.

    Args:
        folder: its path below the root, part by part.
    """
    with ExitStack() as opened:
        try:
            there = regular_file_names(root, *folder)
            names = [name for name in there if name in named][:MAX_MODEL_FILES]
            files = {name: opened.enter_context(open_regular(root, *folder, name)) for name in names}
        except OSError:  # deleted at this moment, or not plain
            return None
        opened.pop_all()
        return files
    return None


def close(files: Mapping[str, BinaryIO]) -> None:
    """Closes open files; may be called repeatedly."""
    for file in files.values():
        file.close()


def tar_size(files: Mapping[str, BinaryIO], folder: str) -> int:
    """Bytes of `tar_of(files, folder)`."""
    return sum(_size_of(name, file, folder) for name, file in files.items()) + 2 * 512


def _size_of(name: str, file: BinaryIO, folder: str) -> int:
    header = _entry(name, file, folder).tobuf(tarfile.GNU_FORMAT)  # a long name takes several blocks
    return len(header) + _padded(os.fstat(file.fileno()).st_size)


def _entry(name: str, file: BinaryIO, folder: str) -> tarfile.TarInfo:
    stat = os.fstat(file.fileno())
    entry = tarfile.TarInfo(f"{folder}/{name}")
    entry.size, entry.mtime, entry.mode = stat.st_size, int(stat.st_mtime), 0o644
    return entry


def tar_of(files: Mapping[str, BinaryIO], folder: str) -> Iterator[bytes]:
    """Open files as a tar, a block at a time, under `folder/`; closes them."""
    with ExitStack() as opened:
        for file in files.values():
            opened.enter_context(file)
        for name, file in files.items():
            entry = _entry(name, file, folder)
            yield entry.tobuf(tarfile.GNU_FORMAT)
            yield from blocks_of(file)
            yield b"\0" * (_padded(entry.size) - entry.size)
        yield b"\0" * (2 * 512)


def tar_response(files: Mapping[str, BinaryIO], name: str, stream: Callable[..., Response]) -> Response:
    """A download of open files as `name`.tar, which closes them."""
    return stream(
        tar_of(files, name),
        lambda: close(files),
        media_type="application/x-tar",
        files=len(files),
        headers={
            "Content-Length": str(tar_size(files, name)),
            "Content-Disposition": f'attachment; filename="{name}.tar"',
        },
    )


def _read(settings: Settings, kind: type[Content], job_id: str, *parts: str) -> Content | None:
    """The parsed content of a run's file, or None if the file is missing or invalid."""
    try:
        root = stored_files.path_of_run(settings, job_id, *parts)
        content = read_regular(root, *parts, max_bytes=_MAX_JSON_BYTES)
        return None if content is None else kind.model_validate_json(content)
    except (OSError, ValidationError) as error:
        log.warning("a file of a run cannot be read", job=job_id, file=parts[-1], error=type(error).__name__)
        return None


def _padded(size: int) -> int:
    return -(-size // 512) * 512
