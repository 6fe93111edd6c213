"""The content of training files: streamed to disk, checked sample by sample, converted if need be."""

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from app.contract.data_formats import BadLine, Classes, DataFormat, parse_line
from app.datasets.conversion import convert, file_type_at
from app.datasets.file_types import ReadOptions
from app.errors import InvalidRequest, TooLarge
from app.settings import Settings
from app.storage import unsettled_files
from app.storage.ids import new_id

_BLOCK = 2**20


@dataclass(frozen=True)
class CheckedFile:
    """What a training file holds."""

    sha256: str
    bytes: int
    format: DataFormat
    examples: int
    classes: tuple[str, ...] | None = None
    """See `Classes.found`."""


def store_upload(
    source: BinaryIO, path: Path, settings: Settings, name: str, how: ReadOptions | None = None
) -> CheckedFile:
    """Copies an upload to its place and checks every sample in it. JSON lines are stored as they are; other
    kinds of files, and files whose columns are assigned, are converted to JSON lines.

    Args:
        name: the file's own name, whose ending tells its kind.
        how: how to read it.

    Raises:
        TooLarge: the upload is larger than `max_file_bytes`.
        InvalidRequest: it cannot be read, or a sample is not a valid example.
    """
    written = 0
    unsettled_files.mark(path)
    with path.open("xb") as target:
        path.chmod(0o600)
        while block := source.read(_BLOCK):
            written += len(block)
            if written > settings.max_file_bytes:
                raise TooLarge(
                    f"The file is larger than {settings.max_file_bytes} bytes (ACCRUE_MAX_FILE_BYTES): "
                    "divide it, or ask the administrator of this service to raise the limit.",
                    field="file",
                )
            target.write(block)
        _make_durable(target, path.parent)
    found = DataFiles(((path, name),), how or ReadOptions())
    if found.are_kept_as_they_are("file"):
        return check(path, settings, field="file")
    original = path.with_name(f"{path.name}.upload")
    path.rename(original)
    try:
        found = replace(found, sources=((original, name),))
        return store_converted(found, path, settings, field="file")
    finally:
        original.unlink(missing_ok=True)


class DownloadFolder:
    """A folder for files that a request downloads; it is deleted once nothing refers to this object, or by
    `delete`."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.files_dir / f"{new_id('file')}.upload"
        self.path.mkdir(mode=0o700)
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class DataFiles:
    """Files that together are one dataset."""

    sources: tuple[tuple[Path, str], ...]
    """Each file, with the name that it is known by."""
    how: ReadOptions
    folder: "DownloadFolder | None" = None
    """Where the files are, if they were downloaded."""

    def are_kept_as_they_are(self, field: str) -> bool:
        """Whether nothing needs to be converted.

        Raises:
            InvalidRequest: the file is of a kind that is not supported.
        """
        [(path, name), *more] = self.sources
        return not more and not self.how.columns and file_type_at(path, name, field) == "jsonl"


def check_files(found: DataFiles, settings: Settings, field: str) -> CheckedFile:
    """Reads the files of a dataset, as `check` does.

    Raises:
        InvalidRequest: as in `check`.
    """
    if found.are_kept_as_they_are(field):
        return check(found.sources[0][0], settings, field)
    path = settings.files_dir / f"{new_id('file')}.upload"
    try:
        return store_converted(found, path, settings, field)
    finally:
        path.unlink(missing_ok=True)


def store_files(found: DataFiles, path: Path, settings: Settings, field: str) -> CheckedFile:
    """Stores a dataset's files as one training file.

    Raises:
        TooLarge, InvalidRequest: as in `store_upload`.
    """
    if found.are_kept_as_they_are(field):
        [(source, name)] = found.sources
        with source.open("rb") as content:
            return store_upload(content, path, settings, name)
    unsettled_files.mark(path)
    return store_converted(found, path, settings, field)


def store_converted(found: DataFiles, path: Path, settings: Settings, field: str) -> CheckedFile:
    """Writes the samples of files as one file of JSON lines.

    Raises:
        InvalidRequest: a file cannot be read, or a sample is not a valid example.
    """
    path.touch(mode=0o600)
    converted = convert(found.sources, path, found.how, settings, field)
    with path.open("rb+") as target:
        _make_durable(target, path.parent)
    return CheckedFile(
        digest(path), path.stat().st_size, converted.format, converted.examples, converted.classes
    )


def store_lines(form: DataFormat, lines: Iterable[dict[str, Any]], path: Path) -> CheckedFile:
    """Writes inline samples as a training file."""
    examples = 0
    unsettled_files.mark(path)
    with path.open("wb") as target:
        path.chmod(0o600)
        for line in lines:
            target.write(json.dumps(line).encode() + b"\n")
            examples += 1
        _make_durable(target, path.parent)
    return CheckedFile(digest(path), path.stat().st_size, form, examples)


def check(path: Path, settings: Settings, field: str) -> CheckedFile:
    """Reads a training file once, a line at a time.

    Raises:
        InvalidRequest: the file has no example, or a line is invalid; the message gives the line's number.
    """
    form: DataFormat | None = None
    examples, classes = 0, Classes()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(settings.max_line_bytes + 1):
            number += 1
            if len(line) > settings.max_line_bytes:
                raise InvalidRequest(
                    f"Line {number} is longer than {settings.max_line_bytes} bytes "
                    "(ACCRUE_MAX_LINE_BYTES): split it into several samples.",
                    field=field,
                )
            if not line.strip():
                continue
            try:
                form, example = parse_line(line, form)
            except BadLine as error:
                raise InvalidRequest(f"Line {number}: {error}.", field=field) from None
            classes.note(example)
            examples += 1
    if form is None:
        raise InvalidRequest("The file has no sample: give at least one JSON line.", field=field)
    return CheckedFile(digest(path), path.stat().st_size, form, examples, classes.found())


def _make_durable(file: BinaryIO, folder: Path) -> None:
    """Flushes the content and the directory entry to disk, so that no committed row refers to a lost file."""
    file.flush()
    os.fsync(file.fileno())
    sync(folder)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
