"""Frees disk space on a machine whose files are also in object storage: deletes run directories that it no
longer needs, and copies that have not been used for long."""

import threading
import time
from collections.abc import Callable

import structlog

from app.errors import Unavailable
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.disk import remove_tree
from app.storage.objects import Damaged, Manifest, ObjectStorage, object_storage
from app.storage.tables import Job
from workers.run_directory import RunDirectory, RunDirectoryInUse

log = structlog.get_logger("accrue.worker")

_UNUSED_SECONDS = 7 * 24 * 3600.0
"""Copies and ended jobs' run directories are deleted once they have been unused for this long."""

_EVERY_SECONDS = 3600.0


class DiskCleaner:
    """Looks for what can be deleted, every hour, in a thread of its own.

    Args:
        running: returns the ids of the jobs that run on this machine.
    """

    def __init__(self, settings: Settings, database: Database, running: Callable[[], set[str]]) -> None:
        self._settings, self._database, self._running = settings, database, running
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
        for copy in stored_files.remove_unused(self._settings, _UNUSED_SECONDS):
            log.info("an unused copy was deleted", path=str(copy))
        for path in self._settings.runs_dir.glob("ftjob-*"):
            if self._clean_run(RunDirectory(path), storage):
                log.info("a run directory that is not needed here was deleted", job=path.name)

    def _clean_run(self, run: RunDirectory, storage: ObjectStorage) -> bool:
        """Deletes a run directory if it is not needed here. Returns whether it did."""
        if run.stored_in() != self._settings.object_storage:
            return False
        job_id, own = run.path.name, stored_files.attempt_of_run(run.path)
        try:
            newest = stored_files.stored_run(storage, job_id).newest()
            if not self._is_needless(job_id, run, own, newest):
                return False
            with run.locked(wait_seconds=0):
                is_same = own == stored_files.attempt_of_run(run.path) and job_id not in self._running()
                return is_same and remove_tree(run.path)
        except (Damaged, RunDirectoryInUse, OSError):
            return False

    def _is_needless(self, job_id: str, run: RunDirectory, own: int, newest: Manifest | None) -> bool:
        """Whether this machine does not need its own copy of a run directory that was put into the storage: a
        later attempt has replaced it there, its job was deleted, or it has not changed for long and the
        storage has all of it."""
        if own == 0:
            return False  # it was fetched just now
        if newest is None:
            with self._database.reading() as session:
                return session.get(Job, job_id) is None
        if newest.attempt > own:
            return True
        changed = (run.path / "spec.json").stat().st_mtime
        is_whole = "outcome.json" in newest.files and newest.attempt == own
        return is_whole and changed < time.time() - _UNUSED_SECONDS
