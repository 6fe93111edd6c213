"""Which free devices a worker offers to which queued jobs.

Jobs start in the order of the queue, but smaller jobs overtake a job that needs more devices than are free.
Once that job has waited for some time, devices are reserved for it: the free ones, and those that are
expected to become free first. The reservation begins only when the job has already waited at least as long as
it is still expected to wait. Even if the expectation was wrong, the reservation covers at most half of
the job's total wait, so no job keeps devices idle for longer."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from sqlalchemy import and_, case, literal, or_, select

from app.jobs.queue import gpu_mask, gpus_of, worker_meets
from app.planning.devices import MAX_DEVICES
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Attempt, Job

DeviceId = int | str

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class ReservableJob:
    """A queued job that needs several devices, perhaps certain ones."""

    place: float
    """Its place in the queue."""
    devices: int
    gpu_ids: frozenset[int]
    """The GPUs that it must have; empty: any."""
    waited_seconds: float
    job_id: str = ""
    reserved_seconds: float = 0.0
    """For how long devices have been kept for it."""
    is_reserved: bool = False
    """Whether they are kept for it now."""


@dataclass(frozen=True)
class DeviceTier:
    """Free devices for those jobs that are ahead of a place in the queue."""

    before_place: float
    devices: tuple[DeviceId, ...]
    reserved_for: str | None = None
    """The job for which devices are held back from all later tiers."""


class Reservations:
    """For which jobs a worker keeps devices, and for how long it has done so."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._now: set[str] = set()
        self._at = time.monotonic()

    def update(self, waiting: Iterable[ReservableJob]) -> list[ReservableJob]:
        """The jobs, with the time for which devices have been kept for each. Forgets all other jobs."""
        now = time.monotonic()
        passed, self._at = min(now - self._at, _LONGEST_TURN_SECONDS), now
        for job_id in self._now:
            self._seconds[job_id] = self._seconds.get(job_id, 0.0) + passed
        found = [
            replace(
                job,
                reserved_seconds=self._seconds.get(job.job_id, 0.0),
                is_reserved=job.job_id in self._now,
            )
            for job in waiting
        ]
        self._seconds = {job.job_id: job.reserved_seconds for job in found if job.reserved_seconds}
        return found

    def note(self, tiers: Iterable[DeviceTier]) -> None:
        """Notes for which jobs devices are kept from now on."""
        self._now = {tier.reserved_for for tier in tiers if tier.reserved_for is not None}


_LONGEST_TURN_SECONDS = 10.0
"""Caps the time that one poll adds to a reservation: in a longer gap, the worker had no free device to
reserve."""

_MAX_JOBS = 100
"""The maximum number of jobs for which a worker keeps devices at once."""


def jobs_to_reserve_for(
    session: Session,
    after_seconds: float,
    devices: Sequence[DeviceId],
    shrink_above: int,
    labels: Mapping[str, str] = _NO_LABELS,
    shrinkable: Sequence[str] = (),
    of_worker: int = MAX_DEVICES,
) -> list[ReservableJob]:
    """The first queued jobs that need several devices, have waited for some time, and can train on a worker.

    Args:
        after_seconds: how long they must have waited.
        devices: the worker's devices, free or not.
        shrink_above: a job that requests more devices than this is included as well, since it can train on
            fewer.
        labels: the worker's.
        shrinkable: sets of label requirements; a job whose requirements equal one of them is included as well
            if it requests more than `of_worker` devices, since it can train on fewer.
        of_worker: how many devices the worker has, those that are set aside included.
    """
    dialect = session.get_bind().dialect.name
    there = gpu_mask(device for device in devices if isinstance(device, int))
    queued_at = case((Job.not_before > Job.created_at, Job.not_before), else_=Job.created_at)
    waiting = (
        select(Job.place, Job.device_count, Job.gpu_mask, database_now() - queued_at, Job.id)
        .where(
            Job.status == "queued",
            Job.not_before <= database_now(),
            Job.device_count > 1,
            or_(
                Job.device_count <= len(devices),
                Job.device_count > shrink_above,
                and_(Job.device_count > of_worker, Job.requirements.in_(shrinkable)),
            ),
            Job.gpu_mask.bitwise_and(there) == Job.gpu_mask,
            worker_meets(literal(json.dumps(dict(labels))), dialect),
            queued_at <= database_now() - after_seconds,
        )
        .order_by(Job.place, Job.id)
        .limit(_MAX_JOBS)
    )
    return [
        ReservableJob(place, count, frozenset(gpus_of(mask)), waited, job_id)
        for place, count, mask, waited, job_id in session.execute(waiting)
    ]


def seconds_left(session: Session, job_ids: Sequence[str]) -> dict[str, float]:
    """The seconds that each running job is expected to need from now on, by job. A job that has no estimate
    yet is expected to take as long again as it has run."""
    rows = session.execute(
        select(Job.id, Job.progress, database_now() - Attempt.claimed_at)
        .join(Attempt, and_(Attempt.job_id == Job.id, Attempt.attempt == Job.attempt))
        .where(Job.id.in_(job_ids))
    )
    return {job_id: progress.get("eta_seconds") or ran for job_id, progress, ran in rows}


def tiers(
    jobs: Iterable[ReservableJob],
    free: Sequence[DeviceId],
    busy: Mapping[DeviceId, float],
    shrink_above: float = inf,
) -> list[DeviceTier]:
    """What a worker offers, in this order. Each later tier leaves out the devices reserved for one more job,
    and is open to jobs further back in the queue.

    Args:
        jobs: in the order of the queue.
        free: the worker's free devices.
        busy: its other devices that will become free, each with the seconds until then. Devices that are
            set aside are neither free nor busy.
        shrink_above: a job that needs more devices than this takes all of the worker's.
    """
    left, soon, found = list(free), dict(busy), []
    for job in jobs:
        kept = _kept(job, left, soon, shrink_above)
        if kept:
            found.append(DeviceTier(job.place, tuple(left), job.job_id))
            left = [device for device in left if device not in kept]
            soon = {device: seconds for device, seconds in soon.items() if device not in kept}
    return [*found, DeviceTier(inf, tuple(left))]


def _kept(
    job: ReservableJob, free: Sequence[DeviceId], busy: Mapping[DeviceId, float], shrink_above: float
) -> set[DeviceId]:
    """The devices to keep for a job; none if it can start now, or not on this worker, or not soon enough."""
    seconds = {**dict.fromkeys(free, 0.0), **busy}
    if job.gpu_ids:
        chosen: list[DeviceId] = [device for device in seconds if device in job.gpu_ids]
        enough = len(job.gpu_ids)
    else:
        enough = len(seconds) if job.devices > shrink_above else job.devices
        chosen = sorted(seconds, key=lambda device: seconds[device])[:enough]
    if not chosen or len(chosen) < enough:
        return set()
    until_start = max(seconds[device] for device in chosen)
    without = job.waited_seconds - job.reserved_seconds
    is_soon = (
        job.reserved_seconds <= without if job.is_reserved else until_start <= without - job.reserved_seconds
    )
    return set(chosen) if until_start > 0.0 and is_soon else set()
