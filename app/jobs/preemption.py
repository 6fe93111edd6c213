"""Which running jobs make way for a queued job with a higher priority.

A worker that has no device for the next job interrupts jobs with a lower priority: they write a checkpoint,
wait in the queue like jobs submitted at that moment, and later continue from the checkpoint. Every worker
computes the same answer from the database, so that only one of them interrupts jobs.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, literal, select

from app.contract.worker_labels import meets
from app.devices.live_workers import SILENT_SECONDS
from app.jobs.queue import gpu_mask, gpus_of, worker_meets
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Job, Worker
from app.usage import fair_share, quotas
from app.usage.records import NO_KEY

PATIENCE_SECONDS = 10.0
"""How long a job waits at least before others make way: a free device is taken within this time."""

_FREE_SECONDS = 60.0
"""A worker that leaves devices free for this long, although a job could use them, is not claiming any jobs
(it is draining, say)."""


@dataclass(frozen=True)
class Next:
    """The queued job that a worker would start next, if it had the devices."""

    id: str
    owner: str
    priority: int
    place: float
    devices: int
    gpu_ids: frozenset[int]
    """The GPUs that it must have; empty: any."""
    requirements: str
    waited_seconds: float


@dataclass(frozen=True)
class Occupant:
    """A running job, with the devices that it occupies."""

    id: str
    owner: str
    priority: int
    place: float
    devices: frozenset[int | str]


@dataclass(frozen=True)
class Machine:
    """A worker, with the devices of its machine."""

    worker_id: str
    occupants: tuple[Occupant, ...]
    """The jobs that it runs."""
    free: frozenset[int | str]
    """The devices that no job of any worker uses."""


def decide(
    session: Session, worker_id: str, labels: dict[str, str], *, fairly: bool = False
) -> tuple[str, tuple[str, ...]] | None:
    """The queued job for which a worker should interrupt some of its jobs, and the ids of these; None if it
    should interrupt none.

    Args:
        worker_id: the worker that asks.
        labels: its labels.
        fairly: whether keys take turns (app/usage/fair_share.py). Jobs then make way only for jobs of the
            same key, since priority has no effect between keys.
    """
    own = session.get(Worker, worker_id)
    if own is None:
        return None
    following = _next_job(session, frozenset(each["id"] for each in own.devices), labels, fairly=fairly)
    if following is None or following.waited_seconds < PATIENCE_SECONDS:
        return None
    lower = select(Job.id).where(Job.status == "running", Job.priority < following.priority)
    if session.scalar(lower.limit(1)) is None:
        return None
    return chosen(following, _machines(session, following), worker_id, fairly=fairly)


def chosen(
    following: Next, machines: Iterable[Machine], worker_id: str, *, fairly: bool
) -> tuple[str, tuple[str, ...]] | None:
    """`decide`, from what is known of the machines that may run the job."""
    best: tuple[tuple[int, int, str], tuple[str, ...]] | None = None
    for machine in machines:
        if _has_room(following, machine.free) and following.waited_seconds < _FREE_SECONDS:
            return None  # its worker will claim the job
        leaving = making_way(following, machine, fairly=fairly)
        if not leaving:
            continue
        cost = max(each.priority for each in leaving), sum(len(each.devices) for each in leaving)
        ranked = (*cost, machine.worker_id), tuple(each.id for each in leaving)
        if best is None or ranked < best:
            best = ranked
    if best is None or best[0][-1] != worker_id:
        return None
    return following.id, best[1]


def making_way(following: Next, machine: Machine, *, fairly: bool) -> list[Occupant]:
    """The jobs of a worker that make way for a queued one: those with the lowest priorities first, then those
    that come last in the queue, and no more than necessary. Empty if they cannot make enough room."""
    leaving: list[Occupant] = []
    lower = [
        each
        for each in machine.occupants
        if each.priority < following.priority
        and (each.owner == following.owner or not fairly)
        and (not following.gpu_ids or following.gpu_ids & each.devices)
    ]
    for each in sorted(lower, key=lambda each: (each.priority, -each.place)):
        if _has_room(following, _freed(machine, leaving)):
            break
        leaving.append(each)
    if not _has_room(following, _freed(machine, leaving)):
        return []
    for each in list(leaving):
        others = [other for other in leaving if other is not each]
        if _has_room(following, _freed(machine, others)):
            leaving = others
    return leaving


def _freed(machine: Machine, leaving: Sequence[Occupant]) -> frozenset[int | str]:
    return machine.free.union(*(each.devices for each in leaving))


def _has_room(following: Next, free: frozenset[int | str]) -> bool:
    return following.gpu_ids <= free and len(free) >= following.devices


def _next_job(
    session: Session, devices: frozenset[int | str], labels: dict[str, str], *, fairly: bool
) -> Next | None:
    """The job that would start next if all of these devices were free."""
    queued_at = case((Job.not_before > Job.created_at, Job.not_before), else_=Job.created_at)
    there = gpu_mask(device for device in devices if isinstance(device, int))
    owner = func.coalesce(Job.owner, NO_KEY)
    query = (
        select(
            Job.id, owner, Job.priority, Job.place, Job.device_count, Job.gpu_mask, Job.requirements,
            database_now() - queued_at,
        )
        .where(
            Job.status == "queued",
            Job.not_before <= database_now(),
            Job.device_count <= len(devices),
            Job.gpu_mask.bitwise_and(there) == Job.gpu_mask,
            owner.not_in(quotas.used_up(session)),
            worker_meets(literal(json.dumps(labels)), session.get_bind().dialect.name),
        )
        .order_by(Job.place, Job.id)
        .limit(1)
    )  # fmt: skip
    turns = [query.where(owner == each) for each in fair_share.order(session)] if fairly else [query]
    for each in turns:
        row = session.execute(each).one_or_none()
        if row is not None:
            job_id, key, priority, place, count, mask, requirements, waited = row
            return Next(job_id, key, priority, place, count, frozenset(gpus_of(mask)), requirements, waited)
    return None


def _machines(session: Session, following: Next) -> list[Machine]:
    """The live workers that may run a job and have enough devices for it."""
    alive = select(Worker).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
    workers, required = list(session.scalars(alive)), json.loads(following.requirements)
    own = func.coalesce(Job.owner, NO_KEY)
    running = session.execute(
        select(Job.worker_id, Job.id, own, Job.priority, Job.place, Job.plan).where(Job.status == "running")
    )
    occupants: dict[str, list[Occupant]] = {}
    for worker_id, job_id, owner, priority, place, plan in running:
        devices = frozenset(rank["gpu_id"] for rank in plan["ranks"])
        occupants.setdefault(worker_id, []).append(Occupant(job_id, owner, priority, place, devices))
    machines = []
    for worker in workers:
        devices = frozenset(each["id"] for each in worker.devices)
        if not (meets(worker.labels, required) and _has_room(following, devices)):
            continue
        beside = [each.id for each in workers if each.hostname == worker.hostname]
        taken = frozenset[int | str]().union(
            *(each.devices for name in beside for each in occupants.get(name, ()))
        )
        machines.append(Machine(worker.id, tuple(occupants.get(worker.id, ())), devices - taken))
    return machines
