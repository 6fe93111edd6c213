"""The live workers, by their heartbeats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from sqlalchemy import delete, or_, select

from app.contract.worker_labels import meets
from app.planning.devices import Device
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Worker

SILENT_SECONDS = 30.0
"""A worker without a heartbeat for this long counts as gone."""

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


def beat(session: Session, worker: Worker) -> None:
    """Records a worker's heartbeat, with its devices and jobs."""
    now = session.scalar(select(database_now())) or 0.0
    session.merge(
        Worker(
            id=worker.id,
            hostname=worker.hostname,
            started_at=worker.started_at or now,
            heartbeat_at=now,
            devices=worker.devices,
            running=worker.running,
            labels=worker.labels or {},
        )
    )


def any_alive(session: Session) -> bool:
    alive = select(Worker.id).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
    return session.scalar(alive.limit(1)) is not None


def devices_by_worker(session: Session, requirements: Mapping[str, str] = _NO_LABELS) -> list[list[Device]]:
    """The devices of each live worker that has devices and the required labels. Workers with GPUs come first;
    within each kind, those with more devices come first."""
    alive = select(Worker).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS).order_by(Worker.id)
    found = [
        [Device(**device) for device in worker.devices]
        for worker in session.scalars(alive)
        if meets(worker.labels, requirements)
    ]
    return sorted(filter(None, found), key=lambda own: (own[0].kind != "cuda", -len(own)))


def labels_of_larger(session: Session, devices: int) -> list[dict[str, str]]:
    """The labels of each live worker that has more than this number of devices."""
    alive = select(Worker).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
    return [worker.labels for worker in session.scalars(alive) if len(worker.devices) > devices]


def gpus(
    session: Session,
    silent_seconds: float = SILENT_SECONDS,
    requirements: Mapping[str, str] = _NO_LABELS,
) -> list[Device]:
    """The GPUs of live workers with the required labels, renumbered from 0 if they are in several
    machines."""
    machines = _by_machine(session, silent_seconds, requirements)
    found = [device for own in machines for device in own]
    return found if len(machines) < 2 else [replace(device, id=n) for n, device in enumerate(found)]


def machines_with_gpus(session: Session, requirements: Mapping[str, str] = _NO_LABELS) -> int:
    """The number of machines with a GPU and a live worker that has the required labels."""
    return len(_by_machine(session, SILENT_SECONDS, requirements))


def _by_machine(
    session: Session, silent_seconds: float, requirements: Mapping[str, str]
) -> list[list[Device]]:
    """The GPUs of each machine; workers on the same machine report the same GPUs."""
    alive = select(Worker).where(Worker.heartbeat_at > database_now() - silent_seconds).order_by(Worker.id)
    machines: dict[str, dict[int | str, Device]] = {}
    for worker in session.scalars(alive):
        if not meets(worker.labels, requirements):
            continue
        own = [Device(**device) for device in worker.devices if device["kind"] == "cuda"]
        machines.setdefault(worker.hostname, {}).update({device.id: device for device in own})
    return [list(own.values()) for own in machines.values() if own]


def forget(session: Session, worker_ids: Sequence[str], silent_seconds: float) -> None:
    """Removes workers that have exited, and those that have been silent for a long time."""
    silent = Worker.heartbeat_at < database_now() - silent_seconds
    session.execute(delete(Worker).where(or_(Worker.id.in_(worker_ids), silent)))
