"""The one place where a job's state changes.

    queued ──claim──► running ──► succeeded | failed | cancelled
      ▲ │               │
      │ └─► cancelled   ├─ release, rescue ──► queued   (an interruption is not a failure)
      │ └─► paused ◄────┤ pause
      └──── resume ─────┘

Ended is ended, with one exception: a person may resume a job that timed out. Pausing, cancelling and stopping
a running job are requests that its worker carries out. Everything that a worker
writes about a job carries its fence (job, attempt, worker): where the job has moved on, nothing is
written and `LostJob` is raised. The caller owns the transaction.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from sqlalchemy import (
    JSON,
    BindParameter,
    Double,
    Integer,
    String,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from app.contract.plan import Plan
from app.contract.reports import Failure, Level
from app.contract.spec import Spec
from app.contract.states import ENDED, JobStatus, Requested
from app.contract.text import storable
from app.errors import Conflict, NotFound
from app.jobs.events import tell, tell_of
from app.statistics import counters, totals
from app.storage.compiled import Prepared
from app.storage.database import database_now
from app.storage.ids import new_id
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import Attempt, DetachedJob, File, Job

MAX_FAILURES = 3
"""A job ends as failed with this many crashes since its last new checkpoint."""

RETRY_AFTER_SECONDS = (2.0, 10.0)
"""Wait before a crashed job is claimed again, by the number of failures so far."""


AGEING_SECONDS = 600.0
"""A job that waits so long has caught up with one of a priority higher by 1: nobody waits for ever."""


LONGEST_LEASE_SECONDS = 600.0
"""A lease that ends later was given before the clock was set back: nobody knows whether it still holds."""


TIMEOUT = "timeout"
"""The error's code of a job that ran longer than it may."""


class LostJob(Exception):
    """The job has another attempt, another worker, or another state by now."""


@dataclass(frozen=True)
class Fence:
    """What a worker must show to write about a job."""

    job_id: str
    attempt: int
    worker_id: str


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
    """Of the trained model's name."""
    webhook_url: str | None = None
    gpu_id: int | None = None
    """The only GPU that may have it."""


_COLUMNS = Job.__table__.columns
_IN_JSON = [column.name for column in _COLUMNS if isinstance(column.type, JSON)]
_NOW = Prepared(lambda dialect: select(database_now()))
_INSERT = Prepared(lambda dialect: insert(Job), _COLUMNS.keys())


def submit(session: Session, submission: Submission) -> Job:
    """Stores a job; it exists once the caller's transaction is committed. What is given is for looking at:
    its `spec` and `plan` are those of the submission, not documents."""
    now = _now(session)
    values: dict[str, Any] = dict.fromkeys(_COLUMNS.keys()) | {
        "id": new_id("ftjob"),
        "owner": session.viewer.maker,
        "created_at": now,
        "place": now - submission.priority * AGEING_SECONDS,
        "status": "paused" if submission.paused else "queued",
        "priority": submission.priority,
        "not_before": 0.0,
        "model_name": submission.spec.model.name,
        "user_id": submission.user_id,
        "labels": submission.metadata,
        "config_id": submission.config_id,
        "file_id": submission.spec.data.file_id,
        "suffix": submission.suffix,
        "webhook_url": submission.webhook_url,
        "config": submission.config,
        "training_config": submission.training_config,
        "spec": submission.spec,
        "plan": submission.plan,
        "gpu_id": submission.gpu_id,
        "attempt": 0,
        "failures": 0,
        "checkpoint_step": 0,
        "progress": {},
    }
    in_json = {name: _as_json(values[name]) for name in _IN_JSON if values[name] is not None}
    _INSERT.run(session, values | in_json)
    job = DetachedJob(**values)
    tell(session, job, "submitted", f"Job submitted: {submission.spec.model.name}, effective batch "
         f"{submission.spec.effective_batch_size}.")  # fmt: skip
    return job


def _as_json(value: Any) -> str:
    return value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value)


def _claim(dialect: str) -> Any:
    jobs: Any = Job.__table__
    may_go_there = or_(jobs.c.gpu_id.is_(None), jobs.c.gpu_id == bindparam("gpu_id", type_=Integer))
    following = (
        select(jobs.c.id)
        .where(jobs.c.status == "queued", jobs.c.not_before <= database_now(), may_go_there)
        .order_by(jobs.c.place, jobs.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    return (
        update(jobs)
        .where(jobs.c.id == following, jobs.c.status == "queued")
        .values(
            status="running",
            worker_id=bindparam("worker"),
            attempt=jobs.c.attempt + 1,
            lease_until=database_now() + bindparam("lease_seconds", type_=Double),
            started_at=func.coalesce(jobs.c.started_at, database_now()),
        )
        .returning(jobs.c.id, jobs.c.attempt)
    )


def _begin_attempt(dialect: str) -> Any:
    given: dict[str, Any] = {name: bindparam(name) for name in ("job_id", "attempt", "worker_id")}
    return insert(Attempt.__table__).values(given | {"claimed_at": database_now()})  # type: ignore[arg-type]


_CLAIM, _BEGIN_ATTEMPT = Prepared(_claim), Prepared(_begin_attempt)


def claim(session: Session, worker_id: str, lease_seconds: float, gpu_id: int | None = None) -> Fence | None:
    """The next queued job, now running under this worker with a new attempt; null if there is none.

    Args:
        gpu_id: the GPU that it is for; null: a CPU.
    """
    told = {"worker": worker_id, "lease_seconds": lease_seconds, "gpu_id": gpu_id}
    claimed = _CLAIM.run(session, told)
    if not claimed:
        return None
    ((job_id, attempt),) = claimed
    fence = Fence(job_id, attempt, worker_id)
    _BEGIN_ATTEMPT.run(session, vars(fence))
    message = f"Attempt {fence.attempt} started."
    tell_of(session, fence.job_id, fence.attempt, "started", message, data={"attempt": fence.attempt})
    return fence


def store_plan(session: Session, fence: Fence, plan: Plan, device: str) -> None:
    """The worker's own plan, with the attempt and on the job."""
    content = plan.model_dump(mode="json")
    _write(session, fence, plan=content, device=device)
    session.execute(update(Attempt).where(_of_attempt(fence)).values(plan=content))


def heartbeat(session: Session, fence: Fence, lease_seconds: float) -> Requested | None:
    """Renews the lease; gives what was requested of the job meanwhile.

    Raises:
        LostJob: the lease is gone.
    """
    row = session.execute(
        update(Job)
        .where(_held(fence))
        .values(lease_until=database_now() + lease_seconds)
        .returning(Job.requested)
    ).one_or_none()
    if row is None:
        raise LostJob(fence.job_id)
    requested: Requested | None = row.requested
    return requested


def note_progress(session: Session, fence: Fence, progress: dict[str, Any], checkpoint_step: int) -> None:
    """What the trainer's log says so far. A checkpoint that moved on forgets the crashes before it."""
    moved_on = literal(checkpoint_step) > Job.checkpoint_step
    _write(
        session,
        fence,
        progress=progress,
        failures=case((moved_on, 0), else_=Job.failures),
        checkpoint_step=case((moved_on, checkpoint_step), else_=Job.checkpoint_step),
    )


def succeed(session: Session, fence: Fence, result: dict[str, Any]) -> None:
    """The model is on disk, and the job is done."""
    _end(session, fence, "succeeded", "Training succeeded.", result=result)


def fail(session: Session, fence: Fence, failure: Failure) -> None:
    """The job cannot be trained, and would fail the same way again."""
    _end(session, fence, "failed", failure.message, level="error", error=_error(failure))


def crash(session: Session, fence: Fence, failure: Failure) -> None:
    """The trainer died. The job is queued again, and fails after `MAX_FAILURES` such ends in a row."""
    failures = session.scalar(select(Job.failures).where(_held(fence)))
    if failures is None:
        raise LostJob(fence.job_id)
    if failures + 1 >= MAX_FAILURES:
        last = Failure(
            code=failure.code,
            message=f"The trainer crashed {MAX_FAILURES} times without a new checkpoint: {failure.message}",
            permanent=True,
        )
        fail(session, fence, last)
        return
    wait = RETRY_AFTER_SECONDS[min(failures, len(RETRY_AFTER_SECONDS) - 1)]
    _leave(session, fence, f"crashed: {failure.message}", "warning", wait, failures + 1)


def release(session: Session, fence: Fence, why: str) -> None:
    """Gives a running job back: to the queue, or to the state that was requested of it."""
    _leave(session, fence, why, "info", 0.0, Job.failures)


def postpone(session: Session, fence: Fence, why: str, wait_seconds: float) -> None:
    """Gives a running job back that its machine could not go on with: tried again after a while."""
    _leave(session, fence, why, "warning", wait_seconds, Job.failures)


def seconds_run(session: Session, fence: Fence) -> float:
    """For how long earlier attempts at a job had it, since it was submitted or resumed after a timeout."""
    timed_out = select(func.coalesce(func.max(Attempt.attempt), 0)).where(
        Attempt.job_id == fence.job_id, Attempt.outcome == "failed"
    )
    earlier = select(func.sum(Attempt.ended_at - Attempt.claimed_at)).where(
        Attempt.job_id == fence.job_id,
        Attempt.attempt < fence.attempt,
        Attempt.attempt > timed_out.scalar_subquery(),
    )
    return float(session.scalar(earlier) or 0.0)


def waiting(session: Session) -> bool:
    """Whether any job is queued, be it for later."""
    return session.scalar(select(Job.id).where(Job.status == "queued").limit(1)) is not None


def count_waiting(session: Session, owner: str | None, most: int) -> int:
    """How many of an owner's jobs are queued or paused, counted up to `most`; null: of everybody's."""
    ((waiting,),) = _COUNT_WAITING.run(session, {"owner": owner, "most": most})
    return int(waiting)


def _count_waiting(dialect: str) -> Any:
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    own = or_(owner.is_(None), Job.owner == owner)
    waiting = or_(Job.status == "queued", Job.status == "paused")
    waits = select(Job.id).where(waiting, own).limit(bindparam("most"))
    return select(func.count()).select_from(waits.subquery())


_COUNT_WAITING = Prepared(_count_waiting)


def rescue(session: Session) -> list[str]:
    """Takes back the jobs whose lease ran out; a lost worker costs the job none of its attempts.

    One that is not lost after all is refused whatever it writes, and its trainer holds the run directory
    until it is gone.
    """
    lost = session.scalars(
        select(Job)
        .where(
            Job.status == "running",
            or_(
                Job.lease_until < database_now(),
                Job.lease_until > database_now() + LONGEST_LEASE_SECONDS,
            ),
        )
        .with_for_update(skip_locked=True)
    ).all()
    for job in lost:
        assert job.worker_id is not None
        fence = Fence(job.id, job.attempt, job.worker_id)
        _leave(session, fence, "its worker was lost", "warning", 0.0, Job.failures)
    return [job.id for job in lost]


def cancel(session: Session, job_id: str) -> Job:
    """Ends a waiting job at once; of a running one it is requested.

    Raises:
        NotFound, Conflict: no such job, or it has ended otherwise. Cancelling twice is fine.
    """
    rescue(session)  # where no worker is left to carry the request out
    job = get(session, job_id, lock=True)
    if job.status in ENDED and job.status != "cancelled":
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to cancel.")
    if job.status == "running":
        _request(session, job, "cancel")
    elif job.status != "cancelled":
        job.status, job.requested = "cancelled", None
        job.finished_at = session.scalar(select(database_now()))
        tell(session, job, "cancelled", "Job cancelled.")
    return job


def pause(session: Session, job_id: str) -> Job:
    """Holds a waiting job back; a running one writes a checkpoint first."""
    rescue(session)
    job = get(session, job_id, lock=True)
    if job.status in ENDED:
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to pause.")
    _check_not_ending(job)
    if job.status == "running":
        _request(session, job, "pause")
    elif job.status == "queued":
        job.status = "paused"
        tell(session, job, "paused", "Job paused.")
    return job


def stop(session: Session, job_id: str) -> Job:
    """Ends training early and keeps the model: after the window at hand, or of the last checkpoint.

    Raises:
        NotFound, Conflict: no such job, or there is nothing of it to keep.
    """
    rescue(session)
    job = get(session, job_id, lock=True)
    if job.status in ENDED:
        raise Conflict(f"Job {job_id} has ended ({job.status}): there is nothing to stop.")
    if job.requested == "cancel":
        raise Conflict(f"Job {job_id} is being cancelled.")
    if job.spec["tune"] == "only":
        raise Conflict(f"Job {job_id} only measures, and makes no model: cancel it instead.")
    if job.status != "running" and not job.checkpoint_step:
        raise Conflict(f"Job {job_id} has not learned anything yet that could be kept: cancel it instead.")
    if job.status != "running":
        job.status, job.not_before = "queued", 0.0
    _request(session, job, "stop")
    return job


def resume(session: Session, job_id: str) -> Job:
    """Puts a job that is paused or timed out back into the queue, or takes back a pause that was only
    requested."""
    job = get(session, job_id, lock=True)
    if job.status == "paused":
        job.status, job.not_before = "queued", 0.0
        tell(session, job, "queued", "Job resumed.")
    elif job.status == "running" and job.requested == "pause":
        job.requested = None
    elif timed_out(job):
        counters.keep(session, job_id)
        job.status, job.error, job.finished_at, job.not_before, job.failures = "queued", None, None, 0.0, 0
        job.worker_id = None
        job.place = _now(session) - job.priority * AGEING_SECONDS
        tell(session, job, "queued", "Job resumed: it has its timeout_seconds once more.")
    elif job.status in ENDED:
        raise Conflict(f"Job {job_id} has ended ({job.status}): submit it again to train anew.")
    else:
        _check_not_ending(job)
    return job


def timed_out(job: Job) -> bool:
    """Whether a job has ended for its `timeout_seconds` alone."""
    return job.status == "failed" and (job.error or {}).get("code") == TIMEOUT


def _now(session: Session) -> float:
    ((now,),) = _NOW.run(session, {})
    return float(now)


def _check_not_ending(job: Job) -> None:
    """Raises:
    Conflict: the job is to end, which is not taken back.
    """
    if job.requested in ("cancel", "stop"):
        raise Conflict(f"Job {job.id} is being {'cancelled' if job.requested == 'cancel' else 'stopped'}.")


def retry(session: Session, job_id: str) -> Job:
    """A new job with the spec of one that failed or was cancelled.

    Raises:
        NotFound, Conflict: no such job, or it ended otherwise, or not yet.
    """
    job = get(session, job_id)
    if job.status not in ("failed", "cancelled"):
        raise Conflict(f"Job {job_id} is {job.status}: only what failed or was cancelled is tried again.")
    again = Submission(
        spec=Spec.model_validate(job.spec),
        plan=Plan.model_validate(job.plan).model_copy(update={"predicted": True}),
        config=job.config,
        training_config=job.training_config,
        config_id=job.config_id,
        user_id=job.user_id,
        metadata=job.labels,
        priority=job.priority,
        paused=False,
        suffix=job.suffix,
        webhook_url=job.webhook_url,
        gpu_id=job.gpu_id,
    )
    return submit(session, again)


def hold(session: Session, fence: Fence) -> None:
    """Keeps others from the job until the transaction ends: what is told of it meanwhile stays in order.

    Raises:
        LostJob: it is no longer this worker's.
    """
    if session.scalar(select(Job.id).where(_held(fence)).with_for_update()) is None:
        raise LostJob(fence.job_id)


def remove(session: Session, job_id: str) -> tuple[str, str | None]:
    """Deletes an ended job; gives its id and that of the file made of its inline texts, if any."""
    job = get(session, job_id, lock=True)
    if job.status not in ENDED:
        raise Conflict(f"Job {job_id} is {job.status}: cancel it before deleting it.")
    counters.keep(session, job_id)
    file = session.get_one(File, job.file_id)
    session.delete(job)
    session.flush()
    of_the_file = select(func.count()).select_from(Job).where(Job.file_id == file.id)
    others = session.scalar(of_the_file, execution_options=OF_EVERYONE)  # an admin may have tried one again
    if not file.inline or others:
        return job_id, None
    session.delete(file)
    return job_id, file.id


def get(session: Session, job_id: str, *, lock: bool = False) -> Job:
    """Raises:
    NotFound: no job has that id.
    """
    job = session.get(Job, job_id, with_for_update=lock or None)
    if job is None:
        raise NotFound(
            f"No job has the id {job_id}: GET /gradient-accumulation/training, or accrue jobs, lists them."
        )
    return job


def _held(fence: Fence) -> Any:
    return and_(
        Job.id == fence.job_id,
        Job.attempt == fence.attempt,
        Job.worker_id == fence.worker_id,
        Job.status == "running",
    )


def _of_attempt(fence: Fence) -> Any:
    return and_(Attempt.job_id == fence.job_id, Attempt.attempt == fence.attempt)


def _write(session: Session, fence: Fence, **values: Any) -> None:
    changed = session.execute(
        update(Job)
        .where(_held(fence))
        .values(**values)
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    ).all()
    if len(changed) != 1:
        raise LostJob(fence.job_id)


def _request(session: Session, job: Job, what: Requested) -> None:
    if job.requested != what:
        job.requested = what
        tell(session, job, f"{what}_requested", f"To be {_DONE[what]}.")


_DONE: dict[Requested, str] = {"pause": "paused", "cancel": "cancelled", "stop": "stopped"}


def _end(
    session: Session,
    fence: Fence,
    status: JobStatus,
    message: str,
    level: Level = "info",
    *,
    result: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> None:
    _write(
        session,
        fence,
        status=status,
        finished_at=database_now(),
        lease_until=None,
        requested=None,
        result=result,
        error=error,
    )
    _close_attempt(session, fence, status)
    tell(session, get(session, fence.job_id), status, message, level=level)


def _leave(
    session: Session, fence: Fence, why: str, level: Level, wait_seconds: float, failures: Any
) -> None:
    """Running to queued, or to what was requested meanwhile. A stop is still to be done then: whoever claims
    the job next saves the model of its last checkpoint."""
    requested = session.scalar(select(Job.requested).where(_held(fence)))
    status = {"cancel": "cancelled", "pause": "paused"}.get(requested or "", "queued")
    _write(
        session,
        fence,
        status=status,
        worker_id=None,
        lease_until=None,
        requested="stop" if requested == "stop" else None,
        failures=failures,
        not_before=database_now() + wait_seconds,
        finished_at=database_now() if status == "cancelled" else None,
    )
    _close_attempt(session, fence, why)
    job = get(session, fence.job_id)
    session.refresh(job)
    tell(session, job, status, f"Attempt {fence.attempt} ended: {why}. The job is {status}.", level=level)


def _close_attempt(session: Session, fence: Fence, outcome: str) -> None:
    session.execute(
        update(Attempt)
        .where(_of_attempt(fence))
        .values(ended_at=database_now(), outcome=storable(outcome)[:500])
    )
    totals.keep(session, fence.job_id)


def _error(failure: Failure) -> dict[str, Any]:
    return {"code": failure.code, "message": storable(failure.message)}
