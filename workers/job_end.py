"""Decides what happens to a job whose trainer has ended."""

import contextlib

import structlog

from app.contract.reports import Failure
from app.jobs import lifecycle, queue
from app.jobs.transitions import Fence, LostJob
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Session
from workers import ingest, job_measurements
from workers.leases import Running
from workers.run_directory import DISK_FULL, DISK_FULL_FAILURE, IN_USE, INTERRUPTED, DamagedRunDirectory
from workers.trainer_process import failure_of

log = structlog.get_logger("accrue.worker")

DEVICE_LOST = "device_lost"
RETRY_SECONDS = {"disk_full": 60.0, DEVICE_LOST: 5.0}
"""The delay before a job is retried after its machine failed, by the failure's code."""
_NOT_STORED_SECONDS = 60.0
"""The delay before retrying a job whose files could not be put into object storage."""
_EVICTED_SECONDS = 10.0
"""The delay before retrying a job whose engine took its devices away."""
_IN_USE_SECONDS = 5.0
"""The delay before retrying a job whose trainer waited in vain for an earlier trainer to end."""


def end_job(
    session: Session, running: Running, status: int, settings: Settings, *, worker_is_stopping: bool
) -> None:
    """Writes the job's next state: succeeded, failed, queued, paused or cancelled.

    Args:
        status: the trainer's exit status; negative if a signal ended the trainer.
        worker_is_stopping: the trainer was interrupted because its worker stops.
    """
    fence = running.fence
    outcome = running.run.outcome() if status == 0 else None
    failure = running.run.failure() or (DISK_FULL_FAILURE if status == DISK_FULL else None)
    log.info("trainer ended", job=fence.job_id, attempt=fence.attempt, status=status)
    job_measurements.store_run(session, running)
    upload_failed = running.upload.failed_because if running.upload is not None else None
    if outcome is not None and upload_failed is not None:
        queue.postpone(session, fence, upload_failed, _NOT_STORED_SECONDS)
    elif outcome is not None and (damage := _damage(running)) is not None:
        queue.fail(session, fence, Failure(code="run_damaged", message=damage, permanent=True))
    elif outcome is not None:
        if outcome.replicas is None:  # each of these has steps of its own
            ingest.forget_steps_after(session, fence, running.position, outcome.steps)
        queue.succeed(session, fence, outcome.model_dump(mode="json"))
    elif running.timed_out:
        message = "The job ran longer than its timeout_seconds: resume it to continue from its checkpoint."
        queue.fail(session, fence, Failure(code=lifecycle.TIMEOUT, message=message, permanent=True))
    elif running.makes_way:
        queue.make_way(session, fence, running.interrupted_because or "it makes way for another job")
    elif running.interrupted_because or (status == INTERRUPTED and worker_is_stopping):
        queue.release(session, fence, running.interrupted_because or "interrupted")
    elif running.trainer.evicted_because is not None:
        queue.postpone(session, fence, running.trainer.evicted_because, _EVICTED_SECONDS)
    elif status == IN_USE:
        queue.postpone(session, fence, "an earlier trainer of the job has not ended yet", _IN_USE_SECONDS)
    elif failure is not None and _is_machine_failure(running, failure):
        queue.postpone(session, fence, failure.message, RETRY_SECONDS[failure.code])
    elif running.stuck:
        message = (
            f"the trainer wrote nothing for {settings.no_progress_seconds:g} seconds; if a step can take "
            "longer, raise ACCRUE_NO_PROGRESS_SECONDS"
        )
        queue.crash(session, fence, Failure(code="no_progress", message=message, permanent=False))
    elif failure is not None and failure.permanent:
        queue.fail(session, fence, failure)
    else:
        queue.crash(session, fence, failure or failure_of(status, running.run.trainer_log))


def _damage(running: Running) -> str | None:
    """What is wrong with the run directory that a trainer has left; None if it is as it should be."""
    try:
        running.run.check_entries()
    except DamagedRunDirectory as damaged:
        return str(damaged)
    return None


def end_attempt(database: Database, fence: Fence, failure: Failure) -> None:
    """Ends an attempt by a failure, unless the job is another worker's by now."""
    with contextlib.suppress(LostJob), database.writing() as session:
        (queue.fail if failure.permanent else queue.crash)(session, fence, failure)


def _is_machine_failure(running: Running, failure: Failure) -> bool:
    """Whether the machine failed, not the job. Such a job is queued again, perhaps for another device."""
    return failure.code in RETRY_SECONDS and (failure.code != DEVICE_LOST or bool(running.failed_device))
