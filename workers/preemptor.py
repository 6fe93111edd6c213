"""Makes room for jobs with a higher priority: which trainers stop for them, and the devices held for them.

The rules are in app/jobs/preemption.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.jobs import preemption
from app.jobs.reservations import DeviceId
from app.planning.devices import Device
from app.settings import Settings
from app.storage.database import Database
from workers.leases import Running
from workers.offers import Offers, device_ids

_LOOK_SECONDS = 2.0
"""How often a worker looks whether its jobs should make way for others."""

_HOLD_SECONDS = 1800.0
"""How long devices are held at most for a job for which others make way, while these write checkpoints."""
_HOLD_FREE_SECONDS = 10.0
"""How long they are held once the others have ended. Another process may use one of them, or it may have
failed."""


@dataclass
class HeldDevices:
    """Devices that are held for a job for which others make way."""

    devices: frozenset[DeviceId]
    leaving: list[Running]
    """The trainers that make way."""
    until: float
    """When the devices are given back, on the monotonic clock."""


class Preemptor:
    """The queued jobs for which this worker is freeing devices, or holds them."""

    def __init__(self, settings: Settings, database: Database, worker_id: str) -> None:
        self._settings, self._database, self._worker_id = settings, database, worker_id
        self.held: dict[str, HeldDevices] = {}
        """The held devices, by the job that they are held for."""
        self._next_look_at = 0.0

    def look(
        self,
        staying: Sequence[Running],
        going: Sequence[Running],
        unclaimed: frozenset[DeviceId],
        offers: Offers,
        labels: Mapping[str, str],
    ) -> tuple[str, list[Running]] | None:
        """Looks for a queued job that others should make way for, and holds its devices from now on.

        Args:
            staying: the worker's trainers that have not been asked to stop.
            going: those that have been asked to stop, or killed, and have not ended yet.
            unclaimed: the free devices that no job has claimed in this turn.
            offers: with what the last offers reserved.
            labels: the worker's.

        Returns:
            The job and the trainers to interrupt for it; None if there is no such job, or it is too early to
            look again.
        """
        now = time.monotonic()
        if now < self._next_look_at:
            return None
        self._next_look_at = now + _LOOK_SECONDS
        view = preemption.WorkerView(
            worker_id=self._worker_id,
            labels=labels,
            running={each.fence.job_id: device_ids(each.devices) for each in staying},
            free=unclaimed,
            leaving=frozenset[DeviceId]().union(*(device_ids(each.devices) for each in going)),
            held=frozenset[DeviceId]().union(*(held.devices for held in self.held.values())),
            reserved=offers.reserved,
            one_device=not self._settings.trainer_network,
            fairly=self._settings.fair_share,
        )
        with self._database.reading() as session:
            room = preemption.find_room(session, view)
        if room is None:
            return None
        with self._database.writing() as session:
            if not preemption.try_claim_preemption(session, room.job_id):
                return None
        chosen = [each for each in staying if each.fence.job_id in room.leaving]
        self.held[room.job_id] = HeldDevices(room.devices, chosen, now + _HOLD_SECONDS)
        return room.job_id, chosen

    def still_held(self, alive: Sequence[Running]) -> Iterator[tuple[str, HeldDevices]]:
        """The jobs that devices are held for. Forgets those that have started elsewhere, were cancelled, or
        waited in vain.

        Args:
            alive: the worker's trainers that have not ended.
        """
        now = time.monotonic()
        for job_id, held in list(self.held.items()):
            if not any(each in alive for each in held.leaving):
                held.until = min(held.until, now + _HOLD_FREE_SECONDS)
            with self._database.reading() as session:
                waits = preemption.still_waits(session, job_id)
            if waits and now <= held.until:
                yield job_id, held
            else:
                del self.held[job_id]

    def take(self, held: HeldDevices, free: dict[Device, int]) -> dict[Device, int]:
        """Removes the held devices from the free ones, and returns them."""
        return {device: free.pop(device) for device in list(free) if device.id in held.devices}
