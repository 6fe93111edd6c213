"""Puts a run directory into object storage while its trainer works, and once more when it has ended.

Each upload stores a version from which any machine can continue the job: the checkpoints, and what was
reported and decided. The last one also has the model. All of it is done in a thread of its own.
"""

import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePosixPath

import structlog

from app.contract.fail_points import fail_point
from app.contract.plain_files import NotPlain, folder, open_plain
from app.storage.objects import Manifest, StoredFile, StoredFolder
from workers.run_directory import RunDirectory

log = structlog.get_logger("accrue.worker")

_LOGS = ("metrics.jsonl", "events.jsonl", "shares.jsonl", "tuning.jsonl")
"""Files that grow line by line. The decisions come after the reports: every step that the stored reports have
was made by stored decisions."""

_FILES = (*_LOGS, "base_model.json", "base_weights", "completions.json", "outcome.json", "trial")
_KERNELS = "comparing-kernels-"
_CHECKPOINTS, _RESULTS = ("checkpoints",), ("model", "profile")
_REPLICA = "replica-"
_DEEPEST, _MOST_FILES = 6, 20_000
"""The depth of folders and the number of files that are stored at most; our trainer makes far less."""

_RETRY_SECONDS = 5.0
_CHANGED_SECONDS = 0.2
"""The pause before an upload begins again since the trainer has deleted a checkpoint meanwhile."""


class RunUpload:
    """The uploads of one attempt.

    Args:
        url: of the object storage.
        patience_seconds: for how long the last upload is tried again if the storage cannot be used.
    """

    def __init__(
        self, run: RunDirectory, stored: StoredFolder, url: str, attempt: int, patience_seconds: float
    ) -> None:
        self._run, self._stored, self._url, self._attempt = run, stored, url, attempt
        self._patience_seconds = patience_seconds
        self.failed_because: str | None = None
        """Why the last upload failed for good; None: it did not."""
        self._number = 0
        self._ended_at: float | None = None
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
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self._wanted.set()
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
            ended_at = self._ended_at
            try:
                self._upload(with_results=ended_at is not None)
                if ended_at is not None:
                    return
            except FileNotFoundError:  # the trainer has deleted a checkpoint meanwhile
                self._cancelled.wait(_CHANGED_SECONDS)
                self._wanted.set()
            except Exception as error:
                log.warning("the upload failed", folder=self._stored.prefix, error=str(error))
                if ended_at is not None and time.monotonic() > ended_at + self._patience_seconds:
                    self.failed_because = "the job's files cannot be put into the object storage"
                    return
                self._cancelled.wait(_RETRY_SECONDS)
                self._wanted.set()

    def _upload(self, *, with_results: bool) -> None:
        """Stores a version.

        Raises:
            FileNotFoundError: a file has been deleted meanwhile.
            OSError: a file cannot be read.
            Unavailable: the storage cannot be used.
        """
        self._number += 1
        paths = islice(self._paths(with_results), _MOST_FILES)
        files = {path: self._stored_file(path) for path in paths}
        manifest = Manifest(
            attempt=self._attempt,
            number=self._number,
            files={path: file for path, file in files.items() if file is not None},
        )
        fail_point("upload.publishing")
        if self._cancelled.is_set():
            return
        self._stored.publish(manifest)
        if self._number == 1:
            self._run.note_stored(self._url)
        self._known = {path: each for path, each in self._known.items() if path in manifest.files}
        self._stored.delete_before(manifest)
        log.info("run directory stored", folder=self._stored.prefix, version=manifest.name)

    def _paths(self, with_results: bool) -> Iterator[str]:
        """The paths to store, in the order in which they must be read."""
        names = sorted(path.name for path in self._run.path.iterdir())
        places = ["", *(f"{name}/" for name in names if name.startswith(_REPLICA))]
        for place in places:
            for name in _CHECKPOINTS + (_RESULTS if with_results else ()):
                yield from self._below(f"{place}{name}", _DEEPEST)
        for place in places:
            for name in _FILES:
                yield f"{place}{name}"
        yield from (name for name in names if name.startswith(_KERNELS))

    def _below(self, path: str, levels: int) -> Iterator[str]:
        """The plain files below a folder, without those that are still being written."""
        try:
            with folder(self._run.path, *path.split("/")) as within, os.scandir(within) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        except (NotPlain, FileNotFoundError):
            return
        for name, is_folder in found:
            if name.startswith("."):
                continue
            if is_folder and levels > 1:
                yield from self._below(f"{path}/{name}", levels - 1)
            elif not is_folder:
                yield f"{path}/{name}"

    def _stored_file(self, path: str) -> StoredFile | None:
        """Stores a file, unless this attempt has stored it as it is now. Returns None if it does not exist,
        or is a link or something else."""
        if self._cancelled.is_set():
            return None
        try:
            file = open_plain(self._run.path, *path.split("/"))
        except NotPlain:
            return None
        except FileNotFoundError:
            if not path.startswith(_CHECKPOINTS) and PurePosixPath(path).name in _FILES:
                return None
            raise
        with file:
            state = os.fstat(file.fileno())
            seen = (state.st_size, state.st_mtime_ns, state.st_ino)
            known = self._known.get(path)
            if known is not None and known[0] == seen:
                return known[1]
            limits = {"max_bytes": state.st_size} if PurePosixPath(path).name in _LOGS else {}
            stored = self._stored.store(self._attempt, self._number, path, file, **limits)
            self._known[path] = seen, stored
            return stored
