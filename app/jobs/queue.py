"""Worker actions on jobs: claim, renew the lease, record progress, release and end.

The states and the edges between them are drawn in transitions.py. The caller owns the transaction.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Double,
    Integer,
    String,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from app.contract.plan import Plan
from app.contract.reports import Failure, Level
from app.contract.states import JobStatus, RequestedAction
from app.contract.text import storable
from app.contract.worker_labels import meets
from app.jobs.events import record_event, record_event_without_webhook
from app.jobs.transitions import Fence, LostJob, change, get, held_by
from app.planning.devices import MAX_DEVICES, MAX_GPU_ID
from app.statistics import totals
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now, optional_part
from app.storage.session import Session
from app.storage.tables import Attempt, Job, Worker
from app.usage import fair_share, quotas, records

MAX_FAILURES = 3
"""A job ends as failed with this many crashes since its last new checkpoint."""

RETRY_AFTER_SECONDS = (2.0, 10.0)
"""The wait in seconds before a crashed job is claimed again, by the number of failures so far."""

AGEING_SECONDS = 600.0
"""Waiting for this long counts like one more point of priority, so that no job waits forever."""

LONGEST_LEASE_SECONDS = 600.0
"""A lease that ends more than this many seconds from now was granted before the clock was set back, and
counts as expired."""


def gpu_mask(gpu_ids: Iterable[int]) -> int:
    """A set of GPUs as a number: bit n for GPU n. Those that no job can name are left out."""
    return sum(1 << gpu_id for gpu_id in set(gpu_ids) if gpu_id <= MAX_GPU_ID)


def gpus_of(mask: int) -> tuple[int, ...]:
    """Reverses `gpu_mask`."""
    return tuple(gpu_id for gpu_id in range(MAX_GPU_ID + 1) if mask >> gpu_id & 1)


@dataclass(frozen=True)
class Offer:
    """What a worker offers to the queue: free devices."""

    devices: int
    gpu_ids: tuple[int, ...] = ()
    """The GPUs among them."""
    before_place: float = inf
    """Only jobs ahead of this place in the queue may start."""
    shrink_above: int = MAX_DEVICES
    """A job that requests more devices than this may also start, on only the devices offered, since no worker
    has as many as it requests."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The worker's labels."""
    shrinkable: tuple[str, ...] = ()
    """Sets of required labels. A job that has exactly one of these sets and requests more than `of_worker`
    devices may start with just the devices offered: no worker that meets the set has as many devices as such
    a job requests."""
    of_worker: int = MAX_DEVICES
    """How many devices this worker has."""
    only: str | None = None
    """The only job that may start; None: any."""


ONE_DEVICE = Offer(1)


def worker_meets(labels: ColumnElement[str], dialect: str) -> ColumnElement[bool]:
    """Whether a worker has the labels that a job requires.

    Args:
        labels: the worker's, as JSON.
        dialect: the database's.
    """
    if dialect == "postgresql":
        has_all: ColumnElement[bool] = cast(labels, JSONB).contains(cast(Job.requirements, JSONB))
    else:
        required = func.json_each(Job.requirements).table_valued("key", "value", name="required")
        own = func.json_each(labels).table_valued("key", "value", name="own")
        has_it = exists(
            select(1)
            .select_from(own)
            .where(own.c.key == required.c.key, own.c.value == required.c.value)
            .correlate(required)
        )
        has_all = ~exists(select(1).select_from(required).where(~has_it))
    return or_(Job.requirements == "{}", has_all)


def shrinkable_requirements(
    session: Session, devices: int, labels: Mapping[str, str], larger: Sequence[Mapping[str, str]]
) -> tuple[str, ...]:
    """The different label requirements of queued jobs for which no worker with these labels is large enough.

    Args:
        devices: the number of devices of the worker that asks.
        labels: its labels.
        larger: the labels of the live workers with more devices.
    """
    query = (
        select(Job.requirements)
        .distinct()
        .where(
            Job.status == "queued",
            Job.requirements != "{}",
            Job.device_count > devices,
            worker_meets(literal(json.dumps(dict(labels))), session.get_bind().dialect.name),
        )
    )
    return tuple(
        text
        for text in session.scalars(query)
        if not any(meets(labels_of_other, json.loads(text)) for labels_of_other in larger)
    )


def device_count_of_worker(dialect: str) -> ColumnElement[int]:
    """The number of a worker's devices."""
    length = func.jsonb_array_length if dialect == "postgresql" else func.json_array_length
    return length(Worker.devices)


def _texts_of(array: ColumnElement[str], dialect: str) -> Any:
    """The texts of a JSON array, as a subquery."""
    if dialect == "postgresql":
        return select(func.jsonb_array_elements_text(cast(array, JSONB)).column_valued("text"))
    return select(func.json_each(array).table_valued("value", name="texts").c.value)


def _claim(dialect: str) -> Any:
    jobs: Any = Job.__table__
    free_gpus: BindParameter[int] = bindparam("free_gpus", type_=BigInteger)
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    only: BindParameter[str | None] = bindparam("only", type_=String)
    fits = and_(
        or_(only.is_(None), jobs.c.id == only),
        or_(
            jobs.c.device_count <= bindparam("free_devices", type_=Integer),
            jobs.c.device_count > bindparam("shrink_above", type_=Integer),
            and_(
                jobs.c.device_count > bindparam("of_worker", type_=Integer),
                jobs.c.requirements.in_(_texts_of(bindparam("shrinkable", type_=String), dialect)),
            ),
        ),
        jobs.c.gpu_mask.bitwise_and(free_gpus) == jobs.c.gpu_mask,
        jobs.c.place < bindparam("before_place", type_=Double),
        or_(owner.is_(None), func.coalesce(jobs.c.owner, records.NO_KEY) == owner),
        or_(
            jobs.c.owner.is_(None),
            jobs.c.owner.not_in(_texts_of(bindparam("used_up", type_=String), dialect)),
        ),
        worker_meets(bindparam("labels", type_=String), dialect),
    )
    following = (
        select(jobs.c.id)
        .where(jobs.c.status == "queued", jobs.c.not_before <= database_now(), fits)
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


_CLAIM, _BEGIN_ATTEMPT = CompiledStatement(_claim), CompiledStatement(_begin_attempt)


def claim(
    session: Session,
    worker_id: str,
    lease_seconds: float,
    free: Offer = ONE_DEVICE,
    *,
    fairly: bool = False,
) -> Fence | None:
    """Claims the next queued job for this worker, as a new attempt; returns None if no job may start.

    Args:
        free: the devices that the worker offers.
        fairly: whether keys take turns by what they have used lately (app/usage/fair_share.py).
    """
    values = {
        "worker": worker_id,
        "lease_seconds": lease_seconds,
        "free_devices": free.devices,
        "free_gpus": gpu_mask(free.gpu_ids),
        "labels": json.dumps(dict(free.labels)),
        "before_place": free.before_place,
        "shrink_above": free.shrink_above,
        "of_worker": free.of_worker,
        "only": free.only,
        "shrinkable": json.dumps(free.shrinkable),
        "used_up": json.dumps(quotas.used_up(session)),
    }
    owners = fair_share.order(session) if fairly and free.only is None else [None]
    claimed = next(
        (found for owner in owners if (found := _CLAIM.run(session, {**values, "owner": owner}))), []
    )
    if not claimed:
        return None
    ((job_id, attempt),) = claimed
    fence = Fence(job_id, attempt, worker_id)
    _BEGIN_ATTEMPT.run(session, vars(fence))
    message = f"Attempt {fence.attempt} started."
    record_event_without_webhook(
        session, fence.job_id, fence.attempt, "started", message, data={"attempt": fence.attempt}
    )
    return fence


def store_plan(session: Session, fence: Fence, plan: Plan, device: str) -> None:
    """Stores the worker's own plan with the attempt and with the job."""
    content = plan.model_dump(mode="json")
    change(session, fence, plan=content, device=device)
    session.execute(update(Attempt).where(_of_attempt(fence)).values(plan=content))


def note_start(session: Session, fence: Fence) -> None:
    """Lets the attempt's time begin now: until now, its trainer waited in the queue of an engine."""
    session.execute(update(Attempt).where(_of_attempt(fence)).values(claimed_at=database_now()))


def renew_lease(session: Session, fence: Fence, lease_seconds: float) -> RequestedAction | None:
    """Renews the lease. Returns what a user has requested in the meantime.

    Raises:
        LostJob: the lease is gone.
    """
    return change(session, fence, lease_until=database_now() + lease_seconds)


def note_progress(session: Session, fence: Fence, progress: dict[str, Any], checkpoint_step: int) -> None:
    """Stores what the trainer's log says so far. A newer checkpoint resets the count of crashes."""
    moved_on = literal(checkpoint_step) > Job.checkpoint_step
    change(
        session,
        fence,
        progress=progress,
        failures=case((moved_on, 0), else_=Job.failures),
        checkpoint_step=case((moved_on, checkpoint_step), else_=Job.checkpoint_step),
    )


def succeed(session: Session, fence: Fence, result: dict[str, Any]) -> None:
    """Ends a job as succeeded; its model is on disk."""
    _end(session, fence, "succeeded", "Training succeeded.", result=result)


def fail(session: Session, fence: Fence, failure: Failure) -> None:
    """Ends a job as failed; a retry would fail the same way. A job that was to be cancelled is cancelled."""
    if session.scalar(select(Job.requested).where(held_by(fence))) == "cancel":
        release(session, fence, failure.message)
        return
    _end(session, fence, "failed", failure.message, level="error", error=_error(failure))


def crash(session: Session, fence: Fence, failure: Failure) -> None:
    """Requeues a job whose trainer crashed, or ends it as failed after `MAX_FAILURES` crashes without a
    new checkpoint."""
    failures = session.scalar(select(Job.failures).where(held_by(fence)))
    if failures is None:
        raise LostJob(fence.job_id)
    if failures + 1 >= MAX_FAILURES:
        last = Failure(
            code=failure.code,
            message=f"The trainer crashed {MAX_FAILURES} times without a new checkpoint, last with: "
            f"{failure.message.rstrip('.')}. What it printed is in trainer.log, in the job's run directory "
            "in the service's data folder",
            permanent=True,
        )
        fail(session, fence, last)
        return
    wait = RETRY_AFTER_SECONDS[min(failures, len(RETRY_AFTER_SECONDS) - 1)]
    _leave(session, fence, f"the trainer crashed ({failure.message})", "warning", wait, failures + 1)


def release(session: Session, fence: Fence, why: str) -> None:
    """Returns a running job to its place in the queue, or moves it to the state that was requested."""
    _leave(session, fence, why, "info", 0.0, Job.failures)


def make_way(session: Session, fence: Fence, why: str) -> None:
    """Returns a running job to the queue, like `release`, but as if it had been submitted now. It is then
    behind every waiting job with a higher priority."""
    place = database_now() - Job.priority * AGEING_SECONDS
    _leave(session, fence, why, "info", 0.0, Job.failures, place)


def postpone(session: Session, fence: Fence, why: str, wait_seconds: float) -> None:
    """Puts a job back into the queue because this machine could not continue it; it is retried after
    `wait_seconds`."""
    _leave(session, fence, why, "warning", wait_seconds, Job.failures)


def seconds_run(session: Session, fence: Fence) -> float:
    """Seconds that earlier attempts ran since the job was submitted or resumed after a timeout."""
    timed_out = select(func.coalesce(func.max(Attempt.attempt), 0)).where(
        Attempt.job_id == fence.job_id, Attempt.outcome == "failed"
    )
    earlier = select(func.sum(Attempt.ended_at - Attempt.claimed_at)).where(
        Attempt.job_id == fence.job_id,
        Attempt.attempt < fence.attempt,
        Attempt.attempt > timed_out.scalar_subquery(),
    )
    return float(session.scalar(earlier) or 0.0)


def any_queued(session: Session, labels: Mapping[str, str]) -> bool:
    """Whether any job is queued that a worker with these labels may run, now or later."""
    own = worker_meets(literal(json.dumps(dict(labels))), session.get_bind().dialect.name)
    return session.scalar(select(Job.id).where(Job.status == "queued", own).limit(1)) is not None


def count_waiting(session: Session, owner: str | None, most: int) -> int:
    """The number of an owner's queued and paused jobs, counted up to `most`; owner None: of all owners."""
    ((waiting,),) = _COUNT_WAITING.run(session, {"owner": owner, "most": most})
    return int(waiting)


def _count_waiting(dialect: str) -> Any:
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    own = or_(owner.is_(None), Job.owner == owner)
    waiting = or_(Job.status == "queued", Job.status == "paused")
    waits = select(Job.id).where(waiting, own).limit(bindparam("most"))
    return select(func.count()).select_from(waits.subquery())


_COUNT_WAITING = CompiledStatement(_count_waiting)


def lock_job(session: Session, fence: Fence) -> None:
    """Locks the job until the transaction ends, so that its events stay in order.

    Raises:
        LostJob: it is no longer this worker's.
    """
    if session.scalar(select(Job.id).where(held_by(fence)).with_for_update()) is None:
        raise LostJob(fence.job_id)


def reclaim_expired(session: Session) -> list[str]:
    """Takes back the jobs whose lease has expired; losing a worker does not count as a crash. An attempt ends
    with its lease, however late it is noticed: its trainer did not run for longer.

    If a worker was not lost after all, its writes about the job are rejected, and its trainer keeps the lock
    on the run directory until it exits.
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
    reclaimed = []
    rows = [(job.id, Fence(job.id, job.attempt, job.worker_id or ""), job.lease_until) for job in lost]
    for job_id, fence, lease_until in rows:
        with optional_part(session, "the return of a job to the queue"):
            _leave(
                session, fence, "its worker was lost", "warning", 0.0, Job.failures, lease_until=lease_until
            )
            reclaimed.append(job_id)
    return reclaimed


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
    change(
        session,
        fence,
        status,
        finished_at=database_now(),
        lease_until=None,
        requested=None,
        result=result,
        error=error,
    )
    _close_attempt(session, fence, status)
    record_event(session, get(session, fence.job_id), status, message, level=level)


def _leave(
    session: Session,
    fence: Fence,
    why: str,
    level: Level,
    wait_seconds: float,
    failures: Any,
    place: Any = Job.place,
    lease_until: float | None = None,
) -> None:
    """Moves a running job to queued, or to the state that was requested. A stop request is kept: the worker
    that claims the job next saves the model of its last checkpoint.

    Args:
        lease_until: when the lease of a lost worker expired.
    """
    requested = session.scalar(select(Job.requested).where(held_by(fence)))
    status: JobStatus = (
        "cancelled" if requested == "cancel" else "paused" if requested == "pause" else "queued"
    )
    change(
        session,
        fence,
        status,
        worker_id=None,
        lease_until=None,
        requested="stop" if requested == "stop" else None,
        failures=failures,
        place=place,
        not_before=database_now() + wait_seconds,
        finished_at=database_now() if status == "cancelled" else None,
    )
    _close_attempt(session, fence, why, lease_until)
    job = get(session, fence.job_id)
    session.refresh(job)
    record_event(
        session, job, status, f"Attempt {fence.attempt} ended: {why}. The job is {status}.", level=level
    )


def _close_attempt(session: Session, fence: Fence, outcome: str, lease_until: float | None = None) -> None:
    ended_at: ColumnElement[float] = database_now()
    if lease_until is not None:
        expired = and_(database_now() > lease_until, Attempt.claimed_at <= lease_until)
        ended_at = case((expired, literal(lease_until)), else_=database_now())
    session.execute(
        update(Attempt).where(_of_attempt(fence)).values(ended_at=ended_at, outcome=storable(outcome)[:500])
    )
    with optional_part(session, "the totals of a job"):
        totals.store_totals(session, fence.job_id)
    with optional_part(session, "the usage of a key"):
        records.record(session, fence.job_id, fence.attempt)


def _error(failure: Failure) -> dict[str, Any]:
    return {"code": failure.code, "message": storable(failure.message)}


def _of_attempt(fence: Fence) -> Any:
    return and_(Attempt.job_id == fence.job_id, Attempt.attempt == fence.attempt)
