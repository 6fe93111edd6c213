"""Which free devices a worker offers to which queued jobs.

Jobs start in the order of the queue, but a job that needs more devices than are free is overtaken by those
behind it. So that it does not wait for ever, devices are kept for it once it has waited for some time: the
free ones, and those that are expected to become free first. They are kept for at most as long as the job has
waited already: nobody can make devices stand idle for longer than that, and a job that waits behind long
ones gets its devices in the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from sqlalchemy import and_, case, or_, select

from app.jobs.queue import gpu_mask, gpus_of
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Attempt, Job

DeviceId = int | str


@dataclass(frozen=True)
class Need:
    """A queued job that needs several devices, or certain ones."""

    place: float
    """Its place in the queue."""
    devices: int
    gpu_ids: frozenset[int]
    """The GPUs that it must have; empty: any."""
    waited_seconds: float


@dataclass(frozen=True)
class Tier:
    """Free devices for those jobs that are ahead of a place in the queue."""

    before_place: float
    devices: tuple[DeviceId, ...]


_MAX_NEEDS = 100
"""The maximum number of jobs for which a worker keeps devices at once."""


def needs(session: Session, after_seconds: float, devices: Sequence[DeviceId], most: int) -> list[Need]:
    """The first queued jobs that need several devices, or certain ones, have waited for some time, and can
    train on a worker.

    Args:
        after_seconds: how long they must have waited.
        devices: the worker's devices, free or not.
        most: jobs that need more devices than this can train on fewer.
    """
    there = gpu_mask(device for device in devices if isinstance(device, int))
    queued_at = case((Job.not_before > Job.created_at, Job.not_before), else_=Job.created_at)
    waiting = (
        select(Job.place, Job.device_count, Job.gpu_mask, database_now() - queued_at)
        .where(
            Job.status == "queued",
            Job.not_before <= database_now(),
            or_(Job.device_count > 1, Job.gpu_mask != 0),
            or_(Job.device_count <= len(devices), Job.device_count > most),
            Job.gpu_mask.bitwise_and(there) == Job.gpu_mask,
            queued_at <= database_now() - after_seconds,
        )
        .order_by(Job.place, Job.id)
        .limit(_MAX_NEEDS)
    )
    return [
        Need(place, count, frozenset(gpus_of(mask)), waited)
        for place, count, mask, waited in session.execute(waiting)
    ]


def seconds_left(session: Session, job_ids: Sequence[str]) -> dict[str, float]:
    """The seconds that running jobs are expected to need, by job. A job that cannot tell yet is expected to
    take as long again as it has run."""
    rows = session.execute(
        select(Job.id, Job.progress, database_now() - Attempt.claimed_at)
        .join(Attempt, and_(Attempt.job_id == Job.id, Attempt.attempt == Job.attempt))
        .where(Job.id.in_(job_ids))
    )
    return {job_id: progress.get("eta_seconds") or ran for job_id, progress, ran in rows}


def tiers(
    needs: Iterable[Need], free: Sequence[DeviceId], busy: Mapping[DeviceId, float], most: float = inf
) -> list[Tier]:
    """What a worker offers, in the order in which it is offered: a later tier has fewer devices, for more
    jobs.

    Args:
        needs: in the order of the queue.
        free: the worker's free devices.
        busy: its other devices that will become free, each with the seconds until then. Devices that
            others hold, or that are set aside, are neither free nor busy.
        most: a job that needs more devices than this takes all of the worker's.
    """
    left, soon, found = list(free), dict(busy), []
    for need in needs:
        kept = _kept(need, left, soon, most)
        if kept:
            found.append(Tier(need.place, tuple(left)))
            left = [device for device in left if device not in kept]
            soon = {device: seconds for device, seconds in soon.items() if device not in kept}
    return [*found, Tier(inf, tuple(left))]


def _kept(need: Need, free: Sequence[DeviceId], busy: Mapping[DeviceId, float], most: float) -> set[DeviceId]:
    """The devices to keep for a job; none if it can start now, or not on this worker, or not soon enough."""
    seconds = {**dict.fromkeys(free, 0.0), **busy}
    if need.gpu_ids:
        chosen: list[DeviceId] = [device for device in seconds if device in need.gpu_ids]
        enough = len(need.gpu_ids)
    else:
        enough = len(seconds) if need.devices > most else need.devices
        chosen = sorted(seconds, key=lambda device: seconds[device])[:enough]
    if not chosen or len(chosen) < enough:
        return set()
    until_start = max(seconds[device] for device in chosen)
    return set(chosen) if 0.0 < until_start <= need.waited_seconds else set()
