"""User actions on jobs: submit, cancel, pause, stop, resume, retry and delete.

The states and the edges between them are drawn in transitions.py. The caller owns the transaction.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import JSON, and_, delete, insert, select

from app.contract.plan import Plan
from app.contract.spec import Spec
from app.contract.states import ENDED, RequestedAction
from app.contract.worker_labels import no_worker_warning
from app.datasets import files
from app.errors import Conflict
from app.jobs import parent_jobs
from app.jobs.events import is_recorded, record_event
from app.jobs.queue import AGEING_SECONDS, gpu_mask, gpus_of, reclaim_expired
from app.jobs.transitions import change, get
from app.statistics import counters
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now, optional_part
from app.storage.ids import new_id
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import DeletedJob, File, Job, StepMetric, job_of

TIMEOUT = "timeout"
"""The error code of a job that exceeded its `timeout_seconds`."""


@dataclass(frozen=True)
class Submission:
    """A job as it will be stored."""

    spec: Spec
    plan: Plan
    config: dict[str, Any]
    training_config: dict[str, Any]
    config_id: str | None
    user_id: int | str | None
    metadata: dict[str, str]
    priority: int
    paused: bool
    suffix: str | None = None
    """A part of the trained model's name."""
    webhook_url: str | None = None
    device_count: int = 1
    """The number of devices that the job trains on."""
    gpu_ids: tuple[int, ...] = ()
    """The only GPUs that may run the job; empty: any device."""
    requirements: dict[str, str] = field(default_factory=dict)
    """The labels that a worker must have to run the job."""


_COLUMNS = Job.__table__.columns
_IN_JSON = [column.name for column in _COLUMNS if isinstance(column.type, JSON)]
_NOW = CompiledStatement(lambda dialect: select(database_now()))
_INSERT = CompiledStatement(lambda dialect: insert(Job), _COLUMNS.keys())


def submit(session: Session, submission: Submission) -> Job:
    """Stores a job, which exists once the caller's transaction is committed.

    Returns:
        The job as a detached object: changes to it are not stored.
    """
    now = _now(session)
    validation = submission.spec.data.validation
    values: dict[str, Any] = dict.fromkeys(_COLUMNS.keys()) | {
        "id": new_id("ftjob"),
        "owner": session.viewer.creator,
        "created_at": now,
        "place": now - submission.priority * AGEING_SECONDS,
        "status": "paused" if submission.paused else "queued",
        "priority": submission.priority,
        "not_before": 0.0,
        "model_name": submission.spec.model.name,
        "user_id": submission.user_id,
        "client_metadata": submission.metadata,
        "config_id": submission.config_id,
        "file_id": submission.spec.data.file_id,
        "validation_file_id": validation.file_id if validation is not None else None,
        "suffix": submission.suffix,
        "webhook_url": submission.webhook_url,
        "config": submission.config,
        "training_config": submission.training_config,
        "spec": submission.spec.model_dump(mode="json"),
        "plan": submission.plan.model_dump(mode="json"),
        "device_count": submission.device_count,
        "gpu_mask": gpu_mask(submission.gpu_ids),
        "requirements": json.dumps(submission.requirements, sort_keys=True),
        "attempt": 0,
        "failures": 0,
        "checkpoint_step": 0,
        "progress": {},
    }
    in_json = {"spec": submission.spec.model_dump_json(), "plan": submission.plan.model_dump_json()}
    for name in _IN_JSON:
        if name not in in_json and values[name] is not None:
            in_json[name] = json.dumps(values[name])
    _INSERT.run(session, values | in_json)
    job = job_of(values)
    record_event(session, job, "submitted", f"Job submitted: {submission.spec.model.name}, effective batch "
         f"{submission.spec.effective_batch_size}.")  # fmt: skip
    return job


MOST_PAUSES = 1000
"""How often a job can be paused: each time adds an event."""


def cancel(session: Session, job_id: str) -> Job:
    """Cancels a waiting job at once; requests the cancellation of a running one.

    Raises:
        NotFound, Conflict: no such job, or it has succeeded or failed. Cancelling twice is allowed.
    """
    reclaim_expired(session)  # if its worker is gone, nobody would carry the request out
    job = get(session, job_id, lock=True)
    if job.status in ENDED and job.status != "cancelled":
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to cancel.")
    if job.status == "running":
        _request(session, job, "cancel")
    elif job.status != "cancelled":
        change(session, job, "cancelled", requested=None, finished_at=database_now())
        record_event(session, job, "cancelled", "Job cancelled.")
    return job


def pause(session: Session, job_id: str) -> Job:
    """Pauses a waiting job at once; a running one writes a checkpoint first."""
    reclaim_expired(session)
    job = get(session, job_id, lock=True)
    if job.status in ENDED:
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to pause.")
    _check_not_ending(job)
    for recorded in ("paused", "pause_requested"):
        if is_recorded(session, job_id, recorded, times=MOST_PAUSES):
            raise Conflict(f"Job {job_id} has been paused {MOST_PAUSES} times: cancel it instead.")
    if job.status == "running":
        _request(session, job, "pause")
    elif job.status == "queued":
        change(session, job, "paused")
        record_event(session, job, "paused", "Job paused.")
    return job


def stop(session: Session, job_id: str) -> Job:
    """Ends training early and keeps the model. A running job first finishes its current window; for a
    waiting job, the model is that of its last checkpoint.

    Raises:
        NotFound, Conflict: no such job, or it has ended, or it has no checkpoint to keep.
    """
    reclaim_expired(session)
    job = get(session, job_id, lock=True)
    if job.status in ENDED:
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to stop.")
    if job.requested == "cancel":
        raise Conflict(f"Job {job_id} is being cancelled.")
    if job.spec["tune"] == "only":
        raise Conflict(f"Job {job_id} only measures, and makes no model: cancel it instead.")
    if job.status != "running" and not job.checkpoint_step:
        raise Conflict(
            f"Job {job_id} has no checkpoint yet, so there is no model to keep: cancel it instead."
        )
    if job.status == "paused":
        change(session, job, "queued")
    if job.status == "queued":
        change(session, job, not_before=0.0)
    _request(session, job, "stop")
    return job


def resume(session: Session, job_id: str) -> Job:
    """Returns a paused or timed-out job to the queue; withdraws a pause request that is still pending."""
    job = get(session, job_id, lock=True)
    if job.status == "paused":
        change(session, job, "queued", not_before=_now(session))
        record_event(session, job, "queued", "Job resumed.")
    elif job.status == "running" and job.requested == "pause":
        change(session, job, requested=None)
    elif timed_out(job):
        parent_jobs.lock(session, Spec.model_validate(job.spec))
        parent_jobs.check_unneeded(session, job_id)  # its checkpoints would be replaced
        with optional_part(session, "the counters of a job"):
            counters.add_to_stored(session, job_id, "job_seconds")  # it starts anew; its events remain
        change(
            session,
            job,
            "queued",
            error=None,
            started_at=None,
            finished_at=None,
            not_before=_now(session),
            failures=0,
            worker_id=None,
            place=_now(session) - job.priority * AGEING_SECONDS,
        )
        record_event(session, job, "queued", "Job resumed; its timeout_seconds starts again.")
    elif job.status in ENDED:
        remedy = "submit a new job" if job.status == "succeeded" else "retry it, or submit a new job"
        raise Conflict(f"Job {job_id} has ended ({job.status}): {remedy}.")
    else:
        _check_not_ending(job)
    return job


def timed_out(job: Job) -> bool:
    """Whether a job failed only because it exceeded its `timeout_seconds`."""
    return job.status == "failed" and (job.error or {}).get("code") == TIMEOUT


def _now(session: Session) -> float:
    ((now,),) = _NOW.run(session, {})
    return float(now)


def _check_not_ending(job: Job) -> None:
    """Rejects a job that is about to end.

    Raises:
        Conflict: its cancellation or stop was requested, and cannot be withdrawn.
    """
    if job.requested in ("cancel", "stop"):
        raise Conflict(f"Job {job.id} is being {'cancelled' if job.requested == 'cancel' else 'stopped'}.")


def retry(session: Session, job_id: str) -> Job:
    """A new job with the spec of one that failed or was cancelled.

    Raises:
        NotFound, Conflict: no such job, or it has neither failed nor been cancelled.
    """
    job = get(session, job_id)
    if job.status not in ("failed", "cancelled"):
        raise Conflict(f"Job {job_id} is {job.status}: only failed or cancelled jobs can be retried.")
    spec, plan = Spec.model_validate(job.spec), Plan.model_validate(job.plan)
    requirements = json.loads(job.requirements)
    parent_jobs.lock(session, spec)
    outdated = no_worker_warning(requirements)
    warnings = tuple(each for each in plan.warnings if each != outdated)
    again = Submission(
        spec=spec,
        plan=plan.model_copy(update={"predicted": True, "warnings": warnings}),
        config=job.config,
        training_config=job.training_config,
        config_id=job.config_id,
        user_id=job.user_id,
        metadata=job.client_metadata,
        priority=job.priority,
        paused=False,
        suffix=job.suffix,
        webhook_url=job.webhook_url,
        device_count=job.device_count,
        gpu_ids=gpus_of(job.gpu_mask),
        requirements=requirements,
    )
    return submit(session, again)


def remove(session: Session, job_id: str) -> tuple[str, list[str]]:
    """Deletes an ended job. If it has many steps, `remove_steps` deletes most of them later, because other
    writers would have to wait for such a long transaction.

    Returns:
        The job's id, and the ids of files with inline data that were deleted, too, since no other job uses
        them: this job's training file, and the file of an earlier job that this one used for validation.
    """
    job = get(session, job_id, lock=True)
    if job.status not in ENDED:
        raise Conflict(f"Job {job_id} is {job.status}: cancel it before deleting it.")
    parent_jobs.check_unneeded(session, job_id)
    with optional_part(session, "the counters of a job"):
        counters.add_to_stored(session, job_id)
    used = {job.file_id, job.validation_file_id} - {None}
    session.delete(job)
    session.flush()
    if not remove_steps(session, job_id):
        session.add(DeletedJob(id=job_id))
    inline = select(File).where(File.id.in_(used), File.inline).order_by(File.id)
    found = session.scalars(inline, execution_options=OF_EVERYONE).all()  # an admin may own the job
    unneeded = [file for file in found if files.is_unneeded(session, file.id)]
    for file in unneeded:
        session.delete(file)
    return job_id, [file.id for file in unneeded]


STEPS_AT_ONCE = 2000
"""The maximum number of steps that one transaction deletes."""


def remove_steps(session: Session, job_id: str) -> bool:
    """Deletes the next steps of a deleted job. Returns whether all are gone."""
    own = StepMetric.job_id == job_id
    last = select(StepMetric.step).where(own).order_by(StepMetric.step).offset(STEPS_AT_ONCE - 1).limit(1)
    through = session.scalar(last)
    part = own if through is None else and_(own, StepMetric.step <= through)
    session.execute(delete(StepMetric).where(part).execution_options(synchronize_session=False))
    return through is None


def _request(session: Session, job: Job, what: RequestedAction) -> None:
    if job.requested != what:
        change(session, job, requested=what)
        record_event(session, job, f"{what}_requested", _REQUESTED[what])


_REQUESTED: dict[RequestedAction, str] = {
    "pause": "Pause requested.",
    "cancel": "Cancellation requested.",
    "stop": "Stop requested.",
}
