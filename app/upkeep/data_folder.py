"""The data folder of a service that runs: held by a lock, and freed of what earlier ones left behind.

A service that is killed may leave an upload that no row names, or the run directory of a job that was being
deleted. Both are removed when a service starts and no other one works in the same folder.
"""

import contextlib
import fcntl
import shutil
from pathlib import Path
from typing import IO

import structlog
from sqlalchemy import select

from app.database import Database
from app.errors import BadSetting
from app.models import File, Job
from app.settings import Settings

log = structlog.get_logger("accrue.service")

_LOCK = ".in-use"


class DataFolder:
    """From `hold()` to `release()` nobody restores a backup into it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock: IO[bytes] | None = None

    def hold(self, database: Database) -> None:
        """Holds the folder together with other services and workers; the first service cleans it up."""
        self._lock = _opened(self._settings)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(database, self._settings)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextlib.contextmanager
def held_alone(settings: Settings):  # type: ignore[no-untyped-def]
    """Holds the folder for one who changes all of it.

    Raises:
        BadSetting: a service works in it.
    """
    settings.make_directories()
    with _opened(settings) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadSetting(
                f"a service is running on {settings.data_dir.absolute()}: stop it first"
            ) from None
        yield


def clean(database: Database, settings: Settings) -> int:
    """Removes files and run directories that no row names; gives how many. No upload may be under way."""
    with database.reading() as session:
        known = {*session.scalars(select(File.id)), *session.scalars(select(Job.id))}
    left = [path for path in settings.files_dir.glob("file-*") if path.name not in known]
    left += [path for path in settings.runs_dir.glob("ftjob-*") if path.name not in known]
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if left:
        log.info("removed what an earlier service left behind", files=len(left))
    return len(left)


def _opened(settings: Settings) -> IO[bytes]:
    return (Path(settings.data_dir.absolute()) / _LOCK).open("ab")
