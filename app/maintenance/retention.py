"""Deletes jobs and files with their content on disk: on request, and by age (`ACCRUE_RETENTION_DAYS`).
The audit log deletes its own old rows (app/security/audit.py)."""

import threading
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import and_, delete, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from app.contract.states import ENDED
from app.datasets import files
from app.errors import AccrueError, ReplacedDatabase
from app.jobs import lifecycle, parent_jobs
from app.settings import Settings
from app.storage import stored_files, unsettled_files
from app.storage.database import Database, database_now, is_unavailable
from app.storage.tables import DeletedJob, File, Job

log = structlog.get_logger("accrue.service")

_DAY = 86400.0
_POLL_SECONDS = 600.0
_STEPS_POLL_SECONDS = 10.0
_LOG_POLL_SECONDS = 60.0
_PAUSE_SECONDS = 0.02
"""Between two parts of a long deletion, so that other writers get a turn."""
_AT_ONCE = 100
_UNUSED_COPY_SECONDS = 7 * _DAY
"""Copies of what is in object storage are deleted once they have not been used for this time."""


def delete_job(database: Database, settings: Settings, job_id: str) -> None:
    """Deletes an ended job, its run directory and the file made from its inline texts.

    Raises:
        NotFound: there is no such job.
        Conflict: it has not ended, or a job that has not ended starts from its model.
    """
    with database.writing() as session:
        job_id, file_ids = lifecycle.remove(session, job_id)
        run_directory = settings.runs_dir / job_id
        for path in (run_directory, *(settings.files_dir / file_id for file_id in file_ids)):
            unsettled_files.mark(path)
    if stored_files.remove_run(settings, job_id):
        unsettled_files.settle(run_directory)  # otherwise the next start of the service tries again
    for file_id in file_ids:
        _remove_content(settings, file_id)


def delete_remaining_steps(database: Database, ended: threading.Event) -> None:
    """Deletes the steps that deleted jobs have left, in short transactions. Stops once `ended` is set."""
    with database.reading() as session:
        job_ids = session.scalars(select(DeletedJob.id)).all()
    for job_id in job_ids:
        all_gone = False
        while not all_gone and not ended.wait(_PAUSE_SECONDS):
            with database.writing() as session:
                all_gone = lifecycle.remove_steps(session, job_id)
                if all_gone:
                    session.execute(delete(DeletedJob).where(DeletedJob.id == job_id))


def delete_file(database: Database, settings: Settings, file_id: str) -> None:
    """Deletes a file that no job uses.

    Raises:
        NotFound: no such file.
        Conflict: a job uses it.
    """
    with database.writing() as session:
        files.remove(session, file_id)
        unsettled_files.mark(settings.files_dir / file_id)
    _remove_content(settings, file_id)


def _remove_content(settings: Settings, file_id: str) -> None:
    """Deletes the content of a file whose row is gone. If the object storage cannot be used, the next start
    of the service tries again."""
    if stored_files.remove_file(settings, file_id):
        unsettled_files.settle(settings.files_dir / file_id)


def delete_expired(database: Database, settings: Settings, days: float) -> int:
    """Deletes jobs that ended more than `days` ago and that no kept job's model needs, then files of that age
    that no job uses; at most 100 of each.

    Returns the total number deleted.
    """
    expired = and_(
        Job.status.in_(ENDED), Job.finished_at.is_not(None), Job.finished_at < database_now() - days * _DAY
    )
    old_jobs = select(Job.id).where(expired)
    used = select(Job.file_id)
    validation = select(Job.validation_file_id).where(Job.validation_file_id.is_not(None))
    old_files = select(File.id).where(
        File.created_at < database_now() - days * _DAY, File.id.not_in(used), File.id.not_in(validation)
    )
    with database.reading() as session:
        job_ids = session.scalars(
            old_jobs.where(Job.id.not_in(parent_jobs.needed(session, expired))).limit(_AT_ONCE)
        ).all()
    gone = _delete_each(job_ids, lambda job_id: delete_job(database, settings, job_id))
    with database.reading() as session:
        file_ids = session.scalars(old_files.limit(_AT_ONCE)).all()
    return gone + _delete_each(file_ids, lambda file_id: delete_file(database, settings, file_id))


def _delete_each(identifiers: Sequence[str], delete: Callable[[str], None]) -> int:
    gone = 0
    for identifier in identifiers:
        try:
            delete(identifier)
        except AccrueError:  # another service was faster, or a job needs it after all
            continue
        except DBAPIError as error:
            if is_unavailable(error):
                raise
            log.exception("could not delete by age", id=identifier)  # go on with the others
            continue
        log.info("deleted by age", id=identifier)
        gone += 1
    return gone


class Retention:
    """From `start()` to `close()`, deletes by age, if an age is set, and what deleted rows have left: the
    steps of jobs, and the copies in SQLite's write-ahead log."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=each, name=each[0].__name__.lstrip("_"), daemon=True)
            for each in (
                (self._delete_steps, _STEPS_POLL_SECONDS),
                (self._delete_by_age, _POLL_SECONDS),
                (self._empty_log, _LOG_POLL_SECONDS),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    def _delete_steps(self) -> int:
        delete_remaining_steps(self._database, self._ended)
        return 0

    def _empty_log(self) -> int:
        self._database.empty_log()
        return 0

    def _delete_by_age(self) -> int:
        stored_files.remove_unused(self._settings, _UNUSED_COPY_SECONDS)
        days = self._settings.retention_days
        return 0 if days is None else delete_expired(self._database, self._settings, days)

    def _repeat(self, delete_some: Callable[[], int], poll_seconds: float) -> None:
        """Deletes at once as long as something was deleted, otherwise every `poll_seconds`."""
        while not self._ended.is_set():
            gone = 0
            try:
                gone = delete_some()
            except (SQLAlchemyError, ReplacedDatabase, OSError) as error:
                log.warning("deletion is interrupted; it is tried again later", error=str(error))
            except Exception:
                log.exception("deletion failed")  # this thread must go on
            self._ended.wait(0.0 if gone else poll_seconds)
