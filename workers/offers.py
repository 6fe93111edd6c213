"""What a worker offers to the queue: which of its free devices, and to which jobs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from app.devices import live_workers
from app.jobs import preemption, queue, reservations
from app.jobs.queue import Offer
from app.jobs.reservations import DeviceId
from app.planning.devices import MAX_DEVICES, Device
from app.settings import Settings
from app.storage.session import Session
from app.storage.tables import Job
from workers.slots import Slots

_ALMOST_FREE_SECONDS = 0.001
"""The seconds until a device is expected to be free, if nothing is known of the job that has it."""

Offered = tuple[list[Device], Offer]
"""An offer, and the devices that are offered."""


class Offers:
    """Makes one worker's offers, and remembers which devices they reserve for queued jobs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reservations = reservations.Reservations()
        self.reserved: tuple[preemption.Reserved, ...] = ()
        """The devices that the last offers reserved for queued jobs."""

    def make(
        self,
        session: Session,
        slots: Slots,
        free: list[Device],
        jobs: Mapping[DeviceId, str],
        labels: Mapping[str, str],
    ) -> list[Offered]:
        """The offers for the free devices, in the order in which they are to be made.

        A job may request more devices than any worker with the labels that the job requires has. If all
        devices of this worker are free, they are offered to such jobs, too; a job then trains on fewer
        devices than it requested.

        Args:
            jobs: the jobs of the devices that are not free, by device.
            labels: the worker's.
        """
        offered_ids = device_ids(free)
        busy = [device.id for device in slots.usable() if device.id not in offered_ids]
        of_worker = len(slots.available())
        if not self._settings.trainer_network:  # each job trains on one device
            return [(free, _offer(free, labels, shrink_above=1))]
        larger = live_workers.labels_of_larger(session, of_worker)
        shrink_above = MAX_DEVICES if larger else of_worker  # no worker has more than `MAX_DEVICES`
        shrinkable = queue.shrinkable_requirements(session, of_worker, labels, larger) if larger else ()
        there = [*(device.id for device in free), *busy]
        wanted = reservations.jobs_to_reserve_for(
            session, self._settings.reserve_after_seconds, there, shrink_above, labels, shrinkable, of_worker
        )
        left = reservations.seconds_left(session, list(jobs.values())) if wanted else {}
        expected = {device: left.get(job_id, 0.0) for device, job_id in jobs.items()}
        found = reservations.tiers(
            self._reservations.update(wanted),
            [device.id for device in free],
            {device: max(_ALMOST_FREE_SECONDS, expected.get(device, 0.0)) for device in busy},
            len(there),
        )
        self._reservations.note(found)
        self.reserved = tuple(
            preemption.Reserved(
                tier.reserved_for, tier.before_place, frozenset(tier.devices) - {*later.devices}
            )
            for tier, later in pairwise(found)
            if tier.reserved_for is not None
        )
        offers = []
        for tier in found:
            offered = [device for device in free if device.id in tier.devices]
            if not offered:
                continue
            if offered == free and not busy:
                offer = _offer(offered, labels, tier.before_place, shrink_above, shrinkable, of_worker)
            else:
                offer = _offer(offered, labels, tier.before_place)
            offers.append((offered, offer))
        return offers

    def for_job(self, job_id: str, devices: list[Device], labels: Mapping[str, str]) -> Offered:
        """An offer of devices to one job alone."""
        shrink_above = MAX_DEVICES if self._settings.trainer_network else 1
        return devices, replace(_offer(devices, labels, shrink_above=shrink_above), only=job_id)


def device_ids(devices: Iterable[Device]) -> frozenset[DeviceId]:
    return frozenset(device.id for device in devices)


def chosen_devices(job: Job, offered: list[Device]) -> list[Device]:
    """The devices of a claimed job: those that it names, or else the first ones of the offer."""
    named = queue.gpus_of(job.gpu_mask)
    if named:
        return [device for device in offered if device.id in named]
    return offered[: job.device_count]


def _offer(
    devices: Sequence[Device],
    labels: Mapping[str, str],
    before_place: float = inf,
    shrink_above: int = MAX_DEVICES,
    shrinkable: tuple[str, ...] = (),
    of_worker: int = MAX_DEVICES,
) -> Offer:
    """An offer of these devices."""
    gpu_ids = tuple(device.id for device in devices if isinstance(device.id, int))
    return Offer(len(devices), gpu_ids, before_place, shrink_above, labels, shrinkable, of_worker)
