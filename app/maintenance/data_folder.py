"""Locks on the data folder while services and workers run, and removal of what services
left behind when they were killed.

A service that is killed may leave an upload that no row names, or the run directory of a job that was being
deleted. Both are marked while they are in progress. A starting service removes them if no other service uses
the folder.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import structlog

from app.errors import BadSetting
from app.settings import Settings
from app.storage import stored_files, unsettled_files
from app.storage.database import Database
from app.storage.disk import remove_tree
from app.storage.tables import File, Job

log = structlog.get_logger("accrue.service")

_SERVICE_LOCK, _WORKER_LOCK = ".in-use", ".worked-in"
"""Services and workers use separate locks, so that the first service cleans up even if a worker is
running."""


class DataFolderLock:
    """A service's lock on the data folder: no backup can be restored between `hold()` and `release()`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock: IO[bytes] | None = None

    def hold(self, database: Database) -> None:
        """Takes a shared lock on the folder, as other services do; the first service cleans it up."""
        self._lock = _opened(self._settings, _SERVICE_LOCK)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(database, self._settings)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextlib.contextmanager
def held_by_worker(settings: Settings) -> Iterator[None]:
    """Takes a shared lock on the folder, as other workers do."""
    with _opened(settings, _WORKER_LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def held_exclusively(settings: Settings) -> Iterator[None]:
    """Locks the folder exclusively, for a command that replaces its contents.

    Raises:
        BadSetting: a service or a worker is using the folder.
    """
    settings.make_directories()
    with contextlib.ExitStack() as locks:
        for name, user in ((_SERVICE_LOCK, "service"), (_WORKER_LOCK, "worker")):
            try:
                fcntl.flock(locks.enter_context(_opened(settings, name)), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadSetting(
                    f"a {user} is running on {settings.data_dir.absolute()}: stop it first"
                ) from None
        yield


def clean(database: Database, settings: Settings) -> int:
    """Removes files and run directories that a killed service left unfinished. Returns how many.

    Only those that are marked as unfinished (`storage/unsettled_files.py`) and named by no row are removed:
    other files without a row may belong to another database. Temporary files of uploads are removed as well,
    and are not counted. No upload may be running.
    """
    removed = 0
    kinds = (
        (settings.files_dir, File, stored_files.remove_file),
        (settings.runs_dir, Job, stored_files.remove_run),
    )
    for folder, table, remove in kinds:
        for name in unsettled_files.marked(folder):
            with database.reading() as session:
                is_named = session.get(table, name) is not None
            if not is_named and not remove(settings, name):
                log.warning("cannot be deleted", path=str(folder / name))
                continue
            removed += not is_named
            unsettled_files.settle(folder / name)
    for pattern in ("file-*.link", "file-*.upload"):
        for unfinished in settings.files_dir.glob(pattern):
            _remove(unfinished)
    if removed:
        log.info("removed what an earlier service left behind", files=removed)
    return removed


def _remove(path: Path) -> bool:
    """Deletes a file or folder. Returns whether it is completely gone."""
    if path.is_dir() and not path.is_symlink():
        return remove_tree(path)
    path.unlink(missing_ok=True)
    return True


def _opened(settings: Settings, name: str) -> IO[bytes]:
    return (Path(settings.data_dir.absolute()) / name).open("ab")
