"""Starts the trainers of claimed jobs: at once, or after fetching what they need from object storage."""

import contextlib
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import DBAPIError

from app.contract.reports import Failure
from app.errors import Unavailable
from app.jobs import queue, transitions
from app.jobs.transitions import Fence, LostJob
from app.planning.devices import Device
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database, is_unavailable
from app.storage.disk import is_full
from app.storage.objects import Damaged, object_storage
from app.storage.tables import Job
from workers.job_end import RETRY_SECONDS, end_attempt
from workers.job_inputs import PendingTrainer
from workers.leases import Running
from workers.run_directory import DISK_FULL_FAILURE, DamagedRunDirectory, RunDirectoryInUse
from workers.run_upload import RunUpload
from workers.trainer_launcher import TrainerLauncher, why_not_started

log = structlog.get_logger("accrue.worker")

_UPLOAD_PATIENCE_SECONDS = 600.0
"""For how long a job that has ended waits for its files to be put into object storage."""


@dataclass(frozen=True)
class JobStart:
    """Starts one worker's trainers; ends the attempts of those that cannot be started."""

    settings: Settings
    database: Database
    launcher: TrainerLauncher

    def begin(
        self, job: Job, fence: Fence, devices: tuple[Device, ...], claimed_at: float, locks: list[int]
    ) -> Running | None:
        """Starts a job's trainer, or begins to fetch what it needs (`go_on`). Returns None if that is
        impossible; the attempt is ended then.

        Args:
            claimed_at, locks: as in `TrainerLauncher.launch`.
        """
        try:
            storage = object_storage(self.settings)
            if storage is None:
                return self.launcher.launch(job, fence, devices, claimed_at, locks)
            return self.launcher.fetch(job, fence, devices, claimed_at, locks, storage)
        except Exception as error:
            self._end_unstarted(fence, error)
            return None

    def go_on(self, running: Running, trainer: PendingTrainer) -> Running | None:
        """Starts a job's trainer once its files have been fetched. Returns what takes the place of `running`:
        itself while files are still being fetched, or None if the attempt has ended, since it was
        interrupted or its files cannot be fetched.

        Raises:
            LostJob: the job belongs to another worker.
        """
        fence, why = running.fence, running.interrupted_because or "interrupted"
        if trainer.status() is not None:
            with self.database.writing() as session:
                (queue.make_way if running.makes_way else queue.release)(session, fence, why)
            return None
        try:
            if trainer.error is not None:
                raise trainer.error
            return running if trainer.inputs is None else self._launch(running, trainer)
        except Exception as error:
            self._end_unstarted(fence, error)
            return None

    def _launch(self, running: Running, trainer: PendingTrainer) -> Running:
        with self.database.reading() as session:
            job = transitions.get(session, running.fence.job_id)
        storage = object_storage(self.settings)
        assert storage is not None  # it was fetched from
        started = self.launcher.launch(
            job,
            running.fence,
            running.devices,
            running.lease_until - self.settings.lease_seconds,
            trainer.locks,
            trainer.inputs,
        )
        started.waited_until = running.waited_until
        assert trainer.inputs is not None  # `go_on` has checked it
        started.upload = RunUpload(
            started.run,
            stored_files.stored_run(storage, job.id),
            self.settings,
            trainer.inputs.stored_attempt,
            _UPLOAD_PATIENCE_SECONDS,
        )
        return started

    def _end_unstarted(self, fence: Fence, error: Exception) -> None:
        if isinstance(error, LostJob):
            log.warning("lost the job before its start", job=fence.job_id)
            return
        log.error("the trainer could not be started", job=fence.job_id, exc_info=error)
        transient = _transient_reason(error)
        if transient is not None:
            with contextlib.suppress(LostJob), self.database.writing() as session:
                queue.postpone(session, fence, transient, RETRY_SECONDS["disk_full"])
            return
        permanent = isinstance(error, DamagedRunDirectory)
        message = error.message if isinstance(error, Damaged) else why_not_started(error)
        failure = Failure(code="not_started", message=message, permanent=permanent)
        end_attempt(self.database, fence, failure)


def _transient_reason(error: Exception) -> str | None:
    """Why a job could not be started now, if the reason has nothing to do with the job and may pass by
    itself; None for any other reason."""
    if is_full(error):
        return DISK_FULL_FAILURE.message
    if isinstance(error, DBAPIError) and is_unavailable(error):
        return "the database could not be used when the job was to start"
    if isinstance(error, Unavailable) and not isinstance(error, Damaged):
        return "the object storage could not be used when the job was to start"
    if isinstance(error, RunDirectoryInUse):
        return "an earlier trainer of the job has not ended yet"
    return None
