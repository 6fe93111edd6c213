"""Puts a run directory into object storage while its trainer works, and once more when it has ended.

Each upload stores a version from which any machine can continue the job: the checkpoints, and what was
reported and decided. The last one also has the model. All of it is done in a thread of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import structlog

from app.contract.fail_points import fail_point
from app.contract.regular_files import NotRegular, folder, open_regular
from app.settings import Settings
from app.storage.disk import remove_tree
from app.storage.objects import Manifest, StoredFile, StoredFolder
from workers.run_directory import RunDirectory

log = structlog.get_logger("accrue.worker")

_LOGS = ("metrics.jsonl", "events.jsonl", "shares.jsonl", "tuning.jsonl")
"""Files that grow line by line. Reports are uploaded before decisions (tuning.jsonl), so that the decisions
behind every stored step are stored, too."""

_FILES = (*_LOGS, "base_model.json", "base_weights", "completions.json", "outcome.json", "trial")
_KERNELS = "comparing-kernels-"
_CHECKPOINTS, _RESULTS = "checkpoints", ("model", "profile")
_REPLICA = "replica-"
_DEEPEST, _MOST_FILES, _LONGEST_PATH = 6, 20_000, 500
"""The depth of a folder, the number of its files and the bytes of a path that are stored at most; our trainer
makes far less."""

_RETRY_SECONDS = 5.0
_CHANGED_SECONDS = 0.2
"""The pause before an upload begins again since the trainer has deleted a checkpoint meanwhile."""


class RunUpload:
    """The uploads of one attempt.

    Args:
        attempt: under which the versions are stored.
        patience_seconds: for how long the last upload may make no progress.
    """

    def __init__(
        self,
        run: RunDirectory,
        stored: StoredFolder,
        settings: Settings,
        attempt: int,
        patience_seconds: float,
    ) -> None:
        self._run, self._stored, self._attempt = run, stored, attempt
        self._url = str(settings.object_storage)
        self._outgoing = settings.copies_dir / "outgoing" / f"{run.path.name}.{attempt}"
        self._checkpoints = run.path
        """Where the checkpoints are read: in the run directory, or linked elsewhere."""
        self._has_noted = False
        self._patience_seconds = patience_seconds
        self.failed_because: str | None = None
        """Why the last upload failed for good; None: it did not."""
        self._number = 0
        self._ends = False
        self._progress_at = time.monotonic()
        self._known: dict[str, tuple[tuple[int, int, int], StoredFile]] = {}
        """What this attempt has stored, by path, with the state of the local file."""
        self._wanted, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"upload {stored.prefix}")
        self._thread.start()

    def request(self) -> None:
        """Uploads what is new, soon: there is another checkpoint."""
        self._wanted.set()

    def finish(self) -> bool:
        """Begins the last upload, of a trainer that has ended. Returns whether it is done, or has failed."""
        if not self._ends:
            self._progress_at = time.monotonic()
            self._ends = True
            self._wanted.set()
        if self._thread.is_alive() and time.monotonic() > self._progress_at + self._patience_seconds:
            self.failed_because = "the job's files could not be put into the object storage"
            self.cancel()
            return True
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Ends without a last upload: the job is another worker's."""
        self._cancelled.set()
        self._wanted.set()

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._cancelled.is_set():
                return
            is_last = self._ends
            try:
                self._upload(with_results=is_last)
                if is_last:
                    return
            except Exception as error:
                is_changed = isinstance(error, FileNotFoundError)  # the trainer has deleted something
                if not is_changed:
                    log.warning("the upload failed", folder=self._stored.prefix, error=str(error))
                self._cancelled.wait(_CHANGED_SECONDS if is_changed else _RETRY_SECONDS)
                self._wanted.set()
            finally:
                remove_tree(self._outgoing)

    def _upload(self, *, with_results: bool) -> None:
        """Stores a version.

        Raises:
            FileNotFoundError: a file has been deleted meanwhile.
            OSError: a file cannot be read.
            Unavailable: the storage cannot be used.
        """
        self._number += 1
        self._link_checkpoints()
        files = {path: self._stored_file(root, path) for root, path in self._paths(with_results)}
        manifest = Manifest(
            attempt=self._attempt,
            number=self._number,
            files={path: file for path, file in files.items() if file is not None},
        )
        fail_point("upload.publishing")
        if self._cancelled.is_set():
            self._stored.delete_version(manifest)
            return
        self._stored.publish(manifest)
        self._progress_at = time.monotonic()
        if not self._has_noted:
            self._run.note_stored(self._url)
            self._has_noted = True
        self._known = {path: each for path, each in self._known.items() if path in manifest.files}
        self._stored.delete_before(manifest)
        log.info("run directory stored", folder=self._stored.prefix, version=manifest.name)

    def _link_checkpoints(self) -> None:
        """Links the files of the checkpoints, so that they can be read to the end even if the trainer deletes
        the checkpoints meanwhile.

        Raises:
            FileNotFoundError: one has been deleted just now.
        """
        remove_tree(self._outgoing)
        self._outgoing.mkdir(mode=0o700, parents=True)
        self._checkpoints = self._outgoing
        for place in self._places():
            for path in self._below(self._run.path, f"{place}{_CHECKPOINTS}"):
                *folders, name = path.split("/")
                target = self._outgoing.joinpath(*folders)
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    with folder(self._run.path, *folders) as within:
                        os.link(name, target / name, src_dir_fd=within, follow_symlinks=False)
                except FileNotFoundError:
                    raise
                except OSError:  # the file system has no links
                    self._checkpoints = self._run.path
                    return

    def _places(self) -> list[str]:
        """Where run directories begin: the job's own, and those of its replicas in it."""
        names = sorted(path.name for path in self._run.path.iterdir())
        return ["", *(f"{name}/" for name in names if name.startswith(_REPLICA))]

    def _paths(self, with_results: bool) -> Iterator[tuple[Path, str]]:
        """What to store, in the order in which it must be read: the folder, and the path below it."""
        places = self._places()
        for place in places:
            yield from (
                (self._checkpoints, path) for path in self._below(self._checkpoints, place + _CHECKPOINTS)
            )
            for name in _RESULTS if with_results else ():
                yield from ((self._run.path, path) for path in self._below(self._run.path, place + name))
        for place in places:
            yield from ((self._run.path, f"{place}{name}") for name in _FILES)
        names = (path.name for path in self._run.path.iterdir())
        yield from ((self._run.path, name) for name in names if name.startswith(_KERNELS))

    def _below(self, root: Path, path: str) -> Iterator[str]:
        """The regular files below a folder, without those that are still being written."""
        return islice(_files_below(root, path, _DEEPEST), _MOST_FILES)

    def _stored_file(self, root: Path, path: str) -> StoredFile | None:
        """Stores a file, unless this attempt has stored it as it is now. Returns None if it does not exist,
        or is a link or something else.

        Raises:
            FileNotFoundError: a file that was there has been deleted.
        """
        if self._cancelled.is_set():
            return None
        try:
            file = open_regular(root, *path.split("/"))
        except NotRegular:
            return None
        except FileNotFoundError:
            if path.rpartition("/")[2] in _FILES and _CHECKPOINTS not in path:
                return None
            raise
        with file:
            state = os.fstat(file.fileno())
            seen = (state.st_size, state.st_mtime_ns, state.st_ino)
            known = self._known.get(path)
            if known is not None and known[0] == seen:
                return known[1]
            limits = {"max_bytes": state.st_size} if path.rpartition("/")[2] in _LOGS else {}
            watched = cast(BinaryIO, _Watched(file, self._note_progress))
            stored = self._stored.store(self._attempt, self._number, path, watched, **limits)
            self._known[path] = seen, stored
            return stored

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()


@dataclass(frozen=True)
class _Watched:
    """A file that tells when it is read."""

    file: BinaryIO
    tell: Callable[[], None]

    def read(self, size: int = -1) -> bytes:
        """Reads from the file."""
        self.tell()
        return self.file.read(size)


def _files_below(root: Path, path: str, levels: int) -> Iterator[str]:
    try:
        with folder(root, *path.split("/")) as within, os.scandir(within) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except NotRegular:
        return
    except FileNotFoundError:
        if levels == _DEEPEST:
            return
        raise
    for name, is_folder in found:
        if name.startswith(".") or not _is_storable(f"{path}/{name}"):
            continue
        if is_folder and levels > 1:
            yield from _files_below(root, f"{path}/{name}", levels - 1)
        elif not is_folder:
            yield f"{path}/{name}"


def _is_storable(path: str) -> bool:
    """Whether object storage can have an object of that name, and a manifest can name it."""
    return "\\" not in path and path.isprintable() and len(path.encode(errors="replace")) <= _LONGEST_PATH
