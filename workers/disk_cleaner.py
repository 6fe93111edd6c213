"""Frees disk space on a machine whose files are also in object storage: deletes run directories that it no
longer needs, and copies that nobody has used for long."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from app.errors import Unavailable
from app.settings import Settings
from app.storage import copies
from app.storage.disk import remove_tree
from app.storage.objects import ObjectStorage, object_storage
from workers.run_directory import RunDirectory, RunDirectoryInUse

log = structlog.get_logger("accrue.worker")

_UNUSED_SECONDS = 7 * 24 * 3600.0
"""Copies and ended jobs' run directories that were not used for so long are deleted."""

_EVERY_SECONDS = 3600.0


class DiskCleaner:
    """Looks for what can be deleted, every hour, in a thread of its own.

    Args:
        running: returns the ids of the jobs that run on this machine.
    """

    def __init__(self, settings: Settings, running: Callable[[], set[str]]) -> None:
        self._settings, self._running = settings, running
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins, if there is object storage."""
        if self._settings.object_storage:
            threading.Thread(target=self._work, daemon=True, name="disk cleaner").start()

    def end(self) -> None:
        """Deletes nothing more."""
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                self.clean()
            except Unavailable:
                pass  # later
            except Exception:
                log.exception("old files cannot be deleted")
            self._ended.wait(_EVERY_SECONDS)

    def clean(self) -> None:
        """Looks once.

        Raises:
            Unavailable: the object storage cannot be used.
        """
        storage = object_storage(self._settings)
        if storage is None:
            return
        for copy in copies.unused(self._settings, _UNUSED_SECONDS):
            remove_tree(copy)
            log.info("a copy was deleted", path=str(copy))
        for path in self._settings.runs_dir.glob("ftjob-*"):
            run = RunDirectory(path)
            if path.name not in self._running() and self._is_needless(run, storage) and _remove(run):
                log.info("a run directory was deleted, whose files are in object storage", job=path.name)

    def _is_needless(self, run: RunDirectory, storage: ObjectStorage) -> bool:
        """Whether a run directory, which this machine has put into the storage, was replaced there by a later
        attempt's, or deleted with its job; or has not changed for long, and is there completely."""
        if run.stored_in() != self._settings.object_storage:
            return False
        newest, own = copies.stored_run(storage, run.path.name).newest(), copies.attempt_of_run(run.path)
        if newest is None or newest.attempt > own:
            return True
        changed = (run.path / "spec.json").stat().st_mtime
        is_whole = "outcome.json" in newest.files and newest.attempt == own
        return is_whole and changed < time.time() - _UNUSED_SECONDS


def _remove(run: RunDirectory) -> bool:
    """Deletes a run directory, unless a trainer works in it."""
    try:
        with run.locked(wait_seconds=0):
            return remove_tree(Path(run.path))
    except (RunDirectoryInUse, OSError):
        return False
