"""Object storage that all machines of a service share: folders are stored file by file, and found again by a
manifest.

A folder's writers never overwrite an object: each of their versions has objects and a manifest of its own,
and the manifest is written last. A reader takes the newest manifest. So a writer that dies in between, or
goes on although the job is another worker's by now, leaves all other versions as they are.

    files/file-1/000000.000001.json          a manifest: of attempt 0, its first version
    files/file-1/000000/000001/content       an object of that version
    runs/ftjob-1/000002.000007.json          the seventh version that a job's second attempt has stored
    runs/ftjob-1/000002/000003/model/config.json
    exports/ftjob-1/export-1/...
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO

import structlog
from pydantic import AfterValidator, ValidationError

from app.contract.base import Frozen
from app.contract.regular_files import create_regular
from app.errors import Unavailable
from app.settings import Settings

log = structlog.get_logger("accrue.storage")

_BLOCK = 2**20
_OBJECT_BLOCK = 2**24
"""Bytes that the storage's client sends or reads at once."""

_MANIFEST = re.compile(r"(\d{6,})\.(\d{6,})\.json")
_VERSIONED = re.compile(r"(\d{6,})[./]")
"""The start of an object's key: the attempt that stored it."""

_ATTEMPTS_TO_FETCH = 5
"""How many times a folder is fetched before giving up, if its version is replaced meanwhile."""


class Damaged(Unavailable):
    """Object storage does not have what a manifest names, or no manifest that can be read."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"In the object storage, {what}: restore it from a backup, or delete what it belongs to."
        )


def _relative(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or "\0" in path or ".." in parts:
        raise ValueError("is not a path below a folder")
    return path


RelativePath = Annotated[str, AfterValidator(_relative)]
"""A path below a folder, with slashes."""


class StoredFile(Frozen):
    """A file of a stored folder."""

    key: RelativePath
    """Of its object, below the folder's prefix."""
    bytes: int
    sha256: str


class Manifest(Frozen):
    """One version of a stored folder."""

    attempt: int
    """Of the job whose trainer made it; a later attempt's version replaces all of an earlier one's."""
    number: int
    files: dict[RelativePath, StoredFile]

    @property
    def name(self) -> str:
        return f"{self.attempt:06d}.{self.number:06d}.json"


class ObjectStorage:
    """A folder of any storage that fsspec can use.

    Args:
        url: such as s3://bucket/folder, gs://bucket or file:///mnt/shared.

    Raises:
        Unavailable: (from every method) the storage does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        with _reported():
            self._system, self._root = fsspec.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True
            )
        self._has_folders = "file" in _protocols(self._system)

    def write(self, key: str, content: bytes) -> None:
        """Stores an object."""
        with _reported():
            self._make_folder(key)
            if self._has_folders:  # a reader must not see a part of it
                partial = f"{self._path(key)}.partial"
                self._system.pipe_file(partial, content)
                self._system.mv(partial, self._path(key))
            else:
                self._system.pipe_file(self._path(key), content)

    def write_from(self, key: str, file: BinaryIO, max_bytes: int | None = None) -> tuple[int, str]:
        """Stores what is left to read of a file, or its first `max_bytes`. Returns its size and SHA-256.

        Raises:
            OSError: the file cannot be read.
        """
        digest, size = hashlib.sha256(), 0
        with _reported():
            self._make_folder(key)
            target = self._system.open(self._path(key), "wb", block_size=_OBJECT_BLOCK)
        try:
            while block := file.read(_BLOCK if max_bytes is None else min(_BLOCK, max_bytes - size)):
                digest.update(block)
                size += len(block)
                with _reported():
                    target.write(block)
        except BaseException:
            with contextlib.suppress(Exception):
                target.close()
                self.delete(key)  # only a part of it was stored
            raise
        with _reported():
            target.close()
        return size, digest.hexdigest()

    def read(self, key: str) -> bytes:
        """An object's content.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with _reported(may_be_missing=True):
            return bytes(self._system.cat_file(self._path(key)))

    def read_into(self, key: str, file: BinaryIO) -> tuple[int, str]:
        """Writes an object's content to a file. Returns its size and SHA-256.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: the file cannot be written.
        """
        digest, size = hashlib.sha256(), 0
        with _reported(may_be_missing=True):
            source = self._system.open(self._path(key), "rb", block_size=_OBJECT_BLOCK)
        with contextlib.closing(source):
            while True:
                with _reported(may_be_missing=True):
                    block = source.read(_OBJECT_BLOCK)
                if not block:
                    return size, digest.hexdigest()
                digest.update(block)
                size += len(block)
                file.write(block)

    def names(self, folder: str) -> list[str]:
        """The names of the objects in a folder, without those in folders in it; empty if there is none."""
        try:
            with _reported(may_be_missing=True):
                found = self._system.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rpartition("/")[2] for entry in found if entry["type"] == "file"]

    def below(self, folder: str) -> list[str]:
        """The keys of all objects below a folder."""
        with _reported():
            found = self._system.find(self._path(folder))
        return [path.removeprefix(f"{self._path('')}") for path in map(str, found)]

    def delete(self, key: str) -> None:
        """Deletes an object, if it exists."""
        with contextlib.suppress(FileNotFoundError), _reported(may_be_missing=True):
            self._system.rm_file(self._path(key))

    def delete_folder(self, folder: str) -> None:
        """Deletes everything below a folder."""
        with contextlib.suppress(FileNotFoundError), _reported(may_be_missing=True):
            self._system.rm(self._path(folder), recursive=True)
            if self._system.find(self._path(folder)):  # some clients leave out what they cannot delete
                raise PermissionError("some objects cannot be deleted")

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _make_folder(self, key: str) -> None:
        if self._has_folders:
            self._system.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


@contextlib.contextmanager
def _reported(*, may_be_missing: bool = False) -> Iterator[None]:
    """Reports whatever the storage's client raises.

    Args:
        may_be_missing: whether it is no failure that an object does not exist (FileNotFoundError). A client
            raises this for a missing bucket, too.
    """
    try:
        yield
    except Exception as error:  # each client has errors of its own
        if may_be_missing and isinstance(error, FileNotFoundError):
            raise
        log.warning("the object storage cannot be used", error=f"{type(error).__name__}: {error}"[:500])
        raise Unavailable(
            "The object storage (ACCRUE_OBJECT_STORAGE) cannot be used at the moment: the service's log has "
            "the reason; accrue doctor checks it."
        ) from error


@lru_cache(maxsize=4)
def _opened(url: str) -> ObjectStorage:
    return ObjectStorage(url)


def object_storage(settings: Settings) -> ObjectStorage | None:
    """The storage of ACCRUE_OBJECT_STORAGE; None if files stay on this machine.

    Raises:
        Unavailable: it cannot be used.
    """
    return _opened(settings.object_storage) if settings.object_storage else None


class StoredFolder:
    """A folder in object storage, in versions."""

    def __init__(self, storage: ObjectStorage, prefix: str) -> None:
        self._storage, self.prefix = storage, prefix

    def newest(self) -> Manifest | None:
        """The newest version; None if there is none.

        Raises:
            Damaged: there are versions, but the manifest of none of them can be read.
            Unavailable: the storage cannot be used.
        """
        for _ in range(_ATTEMPTS_TO_FETCH):
            names = sorted(filter(_MANIFEST.fullmatch, self._storage.names(self.prefix)), reverse=True)
            if not names:
                return None
            damaged = 0
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # replaced just now
                    try:
                        return Manifest.model_validate_json(self._storage.read(f"{self.prefix}/{name}"))
                    except ValidationError:
                        log.warning("a stored manifest is damaged", folder=self.prefix, name=name)
                        damaged += 1
            if damaged == len(names):
                break
        raise Damaged(f"no manifest of {self.prefix} can be read")

    def store(self, attempt: int, number: int, path: str, file: BinaryIO, **limits: int) -> StoredFile:
        """Stores a file of a version whose manifest is written later (`publish`).

        Args:
            path: the file's path below the folder.
        """
        key = f"{attempt:06d}/{number:06d}/{path}"
        size, sha256 = self._storage.write_from(f"{self.prefix}/{key}", file, **limits)
        return StoredFile(key=key, bytes=size, sha256=sha256)

    def publish(self, manifest: Manifest) -> None:
        """Makes a version the newest of its attempt."""
        content = manifest.model_dump_json().encode()
        self._storage.write(f"{self.prefix}/{manifest.name}", content)

    def delete_before(self, manifest: Manifest) -> None:
        """Deletes the versions of this and earlier attempts that a published one replaces, with the objects
        that it does not name."""
        kept = {manifest.name, *(each.key for each in manifest.files.values())}
        for full in self._storage.below(self.prefix):
            key = full.removeprefix(f"{self.prefix}/")
            written = _VERSIONED.match(key)
            if written and int(written[1]) <= manifest.attempt and key not in kept:
                self._storage.delete(full)

    def delete_version(self, manifest: Manifest) -> None:
        """Deletes the objects that were stored for a version that is not published."""
        self._storage.delete_folder(f"{self.prefix}/{manifest.attempt:06d}/{manifest.number:06d}")

    def delete(self) -> None:
        """Deletes all of it."""
        self._storage.delete_folder(self.prefix)

    def fetch(
        self,
        folder: Path,
        wanted: Callable[[str], bool] = lambda path: True,
        newest: Manifest | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Manifest | None:
        """Makes a local folder contain the wanted files of the newest version; files that it has fetched
        before are not fetched again. Returns that version, or None if there is none.

        Args:
            wanted: whether a file is to be fetched, given its path below the folder.
            newest: the newest version, if the caller has just read it.
            is_cancelled: whether no more files are needed; the folder may then lack some.

        Raises:
            Damaged: an object has another content than its manifest says.
            Unavailable: the storage cannot be used.
            OSError: the folder cannot be written.
        """
        for attempt in range(_ATTEMPTS_TO_FETCH):
            manifest = newest if newest is not None and attempt == 0 else self.newest()
            if manifest is None:
                return None
            try:
                self._fetch(manifest, folder, lambda path: wanted(path) and not is_cancelled())
                return manifest
            except FileNotFoundError:  # a newer version has replaced it meanwhile
                log.info("fetching a newer version", folder=self.prefix, attempt=attempt + 1)
        raise Damaged(f"objects of {self.prefix} are missing")

    def _fetch(self, manifest: Manifest, folder: Path, wanted: Callable[[str], bool]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = _fetched(folder)
        for path in before.files.keys() - manifest.files.keys():
            (folder / path).unlink(missing_ok=True)
        fetched = {
            path: file
            for path, file in manifest.files.items()
            if before.files.get(path) == file and (folder / path).is_file()
        }
        try:
            for path, file in manifest.files.items():
                if wanted(path) and path not in fetched:
                    self._fetch_file(file, folder / path)
                    fetched[path] = file
        finally:
            _note_fetched(folder, manifest.model_copy(update={"files": fetched}))

    def _fetch_file(self, file: StoredFile, target: Path) -> None:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(".fetching")
        try:
            with create_regular(partial) as content:
                found = self._storage.read_into(f"{self.prefix}/{file.key}", content)
            if found != (file.bytes, file.sha256):
                raise Damaged(f"the object {self.prefix}/{file.key} is damaged")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


_NOTE = ".fetched.json"
"""A note in a fetched folder: which of its files were fetched, and from which objects."""


def _fetched(folder: Path) -> Manifest:
    with contextlib.suppress(OSError, ValidationError):
        return Manifest.model_validate_json((folder / _NOTE).read_bytes())
    return Manifest(attempt=0, number=0, files={})


def _note_fetched(folder: Path, manifest: Manifest) -> None:
    partial = folder / f"{_NOTE}.partial"
    partial.write_text(manifest.model_dump_json())
    partial.replace(folder / _NOTE)


def move_into_place(fetched: Path, place: Path) -> None:
    """Moves a fetched folder to an empty place, without the note of what was fetched."""
    (fetched / _NOTE).unlink(missing_ok=True)
    shutil.move(fetched, place)
