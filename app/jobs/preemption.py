"""Which running jobs make way for a queued job with a higher priority.

A worker that has no devices for such a job interrupts some of its own jobs: they write a checkpoint, wait in
the queue like jobs submitted at that moment, and later continue from the checkpoint. The worker holds the
devices until it can start the job on them.

A job that has waited so long that it came before jobs with a higher priority keeps its devices: otherwise it
might never make progress.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, case, func, literal, or_, select, update

from app.contract.states import RequestedAction
from app.contract.worker_labels import meets
from app.devices.live_workers import SILENT_SECONDS
from app.jobs.queue import AGEING_SECONDS, gpu_mask, gpus_of, worker_meets
from app.jobs.reservations import DeviceId
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Attempt, Job, Worker
from app.usage import quotas
from app.usage.records import NO_KEY

PATIENCE_SECONDS = 10.0
"""How long a job waits at least before others make way: a free device is taken within this time."""

_ELSEWHERE_SECONDS = 20.0
"""How long it waits if a job with a lower priority runs on another worker, which may make way first."""

_FREE_SECONDS = 60.0
"""After this time, devices that another worker leaves free do not count any more: it is draining, say."""

_AGAIN_SECONDS = 600.0
"""After jobs have made way for a job, none make way for it again for this long: it may be unable to start,
for lack of disk space, for example."""

_MOST = 50
"""The number of queued jobs that are considered, in the order of the queue."""


@dataclass(frozen=True)
class QueuedJob:
    """A queued job, and what it needs."""

    id: str
    owner: str
    priority: int
    devices: int
    gpu_ids: frozenset[int]
    """The GPUs that it must have; empty: any."""
    requirements: str = "{}"
    waited_seconds: float = 0.0
    place: float = 0.0
    """Its place in the queue."""

    def has_room(self, devices: frozenset[DeviceId]) -> bool:
        """Whether it can train on these devices."""
        return self.gpu_ids <= devices and len(devices) >= self.devices


@dataclass(frozen=True)
class Occupant:
    """A running job of a worker."""

    id: str
    owner: str
    priority: int
    claimed_priority: float
    """Its priority, and what it had waited when it was claimed, in points of priority."""
    devices: frozenset[DeviceId]


@dataclass(frozen=True)
class Room:
    """Devices for a job, once others have made way."""

    job_id: str
    devices: frozenset[DeviceId]
    leaving: tuple[str, ...]
    """The ids of the jobs that make way."""


@dataclass(frozen=True)
class Reserved:
    """Devices that are reserved for a job, and offered only to jobs ahead of its place in the queue
    (reservations.py)."""

    job_id: str
    place: float
    devices: frozenset[DeviceId]


@dataclass(frozen=True)
class WorkerView:
    """What a worker knows of itself.

    Args:
        worker_id: its id.
        labels: its labels.
        running: the devices of its jobs that may be interrupted, by job.
        free: devices that it could use now, held and reserved ones included.
        leaving: devices that become free without any interruption.
        held: devices that are held for other jobs for which room was made.
        reserved: free devices that are reserved for queued jobs.
        one_device: whether every job trains on one device, however many it requests.
        fairly: whether keys take turns (app/usage/fair_share.py). Jobs then make way only for jobs of the
            same key, since priority has no effect between keys.
    """

    worker_id: str
    labels: Mapping[str, str]
    running: Mapping[str, frozenset[DeviceId]]
    free: frozenset[DeviceId]
    leaving: frozenset[DeviceId] = frozenset()
    held: frozenset[DeviceId] = frozenset()
    reserved: tuple[Reserved, ...] = ()
    one_device: bool = False
    fairly: bool = False


def find_room(session: Session, view: WorkerView) -> Room | None:
    """The room that a worker should make for a queued job; None if it should make none. The worker then calls
    `try_claim_preemption`."""
    occupants, gone = _occupants(session, view)
    if not occupants:
        return None
    lowest = min(each.priority for each in occupants)
    for waiting in _waiting(session, view, lowest, gone):
        free = (view.free | gone) - view.held - _reserved_before(waiting, view.reserved)
        room = room_for(waiting, occupants, free, fairly=view.fairly)
        if room is not None and not _is_served_elsewhere(session, waiting, view, room, occupants):
            return room
    return None


def _reserved_before(waiting: QueuedJob, reserved: Iterable[Reserved]) -> frozenset[DeviceId]:
    """Devices that are reserved for jobs ahead of one in the queue."""
    ahead = (each for each in reserved if each.job_id != waiting.id and each.place <= waiting.place)
    return frozenset[DeviceId]().union(*(each.devices for each in ahead))


def try_claim_preemption(session: Session, job_id: str) -> bool:
    """Notes that a worker makes room for a job. False if another one has done so in the last ten minutes, or
    the job has started."""
    free = or_(Job.preempts_after.is_(None), Job.preempts_after <= database_now())
    done = session.execute(
        update(Job)
        .where(Job.id == job_id, Job.status == "queued", free)
        .values(preempts_after=database_now() + _AGAIN_SECONDS)
        .returning(Job.id)
    )
    return done.scalar() is not None


def room_for(
    waiting: QueuedJob, occupants: Iterable[Occupant], free: frozenset[DeviceId], *, fairly: bool
) -> Room | None:
    """The devices for a job, and the jobs that make way for it: those with the lowest priorities, and no more
    of them than necessary. None if the free devices are enough, or if making way would not free enough.

    Args:
        free: devices that are free, or will be soon.
    """
    if waiting.has_room(free):
        return None
    leaving: list[Occupant] = []
    lower = [
        each
        for each in occupants
        if each.priority < waiting.priority
        and each.claimed_priority < waiting.priority
        and (each.owner == waiting.owner or not fairly)
        and (not waiting.gpu_ids or waiting.gpu_ids & each.devices)
    ]
    for each in sorted(lower, key=lambda each: (each.priority, each.claimed_priority, each.id)):
        if waiting.has_room(_freed(free, leaving)):
            break
        leaving.append(each)
    if not waiting.has_room(_freed(free, leaving)):
        return None
    for each in list(leaving):
        others = [other for other in leaving if other is not each]
        if waiting.has_room(_freed(free, others)):
            leaving = others
    freed = _freed((), leaving)
    in_order = [*sorted(freed, key=str), *sorted(free - freed, key=str)]
    chosen = frozenset[DeviceId](waiting.gpu_ids or in_order[: waiting.devices])
    return Room(waiting.id, chosen, tuple(each.id for each in leaving))


def _freed(free: Iterable[DeviceId], leaving: Iterable[Occupant]) -> frozenset[DeviceId]:
    return frozenset(free).union(*(each.devices for each in leaving))


def still_waits(session: Session, job_id: str) -> bool:
    """Whether a job for which there is room is still queued, and may start now."""
    waits = select(Job.id).where(
        Job.id == job_id, Job.status == "queued", Job.requested.is_(None), Job.not_before <= database_now()
    )
    return session.scalar(waits) is not None


def _occupants(session: Session, view: WorkerView) -> tuple[list[Occupant], frozenset[DeviceId]]:
    """The jobs of a worker that may make way; and the devices that become free without that."""
    rows = session.execute(
        select(
            Job.id, func.coalesce(Job.owner, NO_KEY), Job.priority, Job.requested,
            Job.priority + (Attempt.claimed_at - _queued_at()) / AGEING_SECONDS,
        )
        .join(Attempt, and_(Attempt.job_id == Job.id, Attempt.attempt == Job.attempt))
        .where(Job.id.in_(view.running), Job.status == "running", Job.worker_id == view.worker_id)
    )  # fmt: skip
    found, gone = [], set(view.leaving)
    requested: RequestedAction | None
    for job_id, owner, priority, requested, claimed in rows:
        if requested is not None:  # it is about to be paused, cancelled or finished
            gone |= view.running[job_id]
        else:
            found.append(Occupant(job_id, owner, priority, claimed, view.running[job_id]))
    return found, frozenset(gone)


def _queued_at() -> ColumnElement[float]:
    """When a job was queued last: at its submission, or when it last ran."""
    return case((Job.not_before > Job.created_at, Job.not_before), else_=Job.created_at)


def _waiting(session: Session, view: WorkerView, lowest: int, gone: frozenset[DeviceId]) -> list[QueuedJob]:
    """The first queued jobs that a worker could run and whose priority is above the lowest among its running
    jobs."""
    queued_at = _queued_at()
    devices = (view.free | gone).union(*view.running.values())
    there = gpu_mask(device for device in devices if isinstance(device, int))
    needed = literal(1) if view.one_device else Job.device_count
    owner = func.coalesce(Job.owner, NO_KEY)
    rows = session.execute(
        select(
            Job.id,
            owner,
            Job.priority,
            needed,
            Job.gpu_mask,
            Job.requirements,
            database_now() - queued_at,
            Job.place,
        )
        .where(
            Job.status == "queued",
            Job.requested.is_(None),
            Job.not_before <= database_now(),
            queued_at <= database_now() - PATIENCE_SECONDS,
            or_(Job.preempts_after.is_(None), Job.preempts_after <= database_now()),
            Job.priority > lowest,
            needed <= len(devices),
            Job.gpu_mask.bitwise_and(there) == Job.gpu_mask,
            owner.not_in(quotas.used_up(session)),
            worker_meets(literal(json.dumps(dict(view.labels))), session.get_bind().dialect.name),
        )
        .order_by(Job.place, Job.id)
        .limit(_MOST)
    )
    return [
        QueuedJob(job_id, key, priority, count, frozenset(gpus_of(mask)), labels, waited, place)
        for job_id, key, priority, count, mask, labels, waited, place in rows
    ]


def _is_served_elsewhere(
    session: Session, waiting: QueuedJob, view: WorkerView, room: Room, occupants: Iterable[Occupant]
) -> bool:
    """Whether another worker can start a job soon: it has free devices, or runs jobs with lower priorities
    than those that would make way here."""
    if waiting.waited_seconds >= _FREE_SECONDS:
        return False
    alive = select(Worker).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
    workers = [each for each in session.scalars(alive) if each.id != view.worker_id]
    required = json.loads(waiting.requirements)
    able = [
        each
        for each in workers
        if meets(each.labels, required)
        and waiting.has_room(frozenset(device["id"] for device in each.devices))
    ]
    if not able:
        return False
    highest = max(each.priority for each in occupants if each.id in room.leaving)
    running = session.execute(
        select(Job.worker_id, Job.priority, Job.device_count).where(
            Job.status == "running", Job.worker_id.in_([each.id for each in able])
        )
    ).all()
    if waiting.waited_seconds < _ELSEWHERE_SECONDS and any(row.priority < highest for row in running):
        return True
    used = {each.id: sum(row.device_count for row in running if row.worker_id == each.id) for each in able}
    return any(len(each.devices) - used[each.id] >= waiting.devices for each in able)
