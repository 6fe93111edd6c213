"""Devices and workers."""

import socket

from sqlalchemy import select

from app.contract.base import Page
from app.devices import gpus
from app.devices.live_workers import SILENT_SECONDS
from app.devices.schemas import DeclaredGpu, GpuInfo, GpusResponse, WorkerResponse
from app.planning.devices import GIB
from app.storage.database import database_now
from app.storage.session import OF_EVERYONE
from app.storage.tables import Job, Worker
from app.web.dependencies import CurrentSettings, Reading
from app.web.routers import native_router
from app.web.session_route import SessionRoute

ANOTHER_KEYS_JOB = "another key's job"

router = native_router(tags=["devices"], route_class=SessionRoute)


@router.get("/gpus", summary="GPUs of this machine, and declared ones")
def list_gpus(session: Reading, settings: CurrentSettings) -> GpusResponse:
    """Lists the GPUs that nvidia-smi reports through GPUtil, and the job that holds each."""
    rows = session.execute(
        select(Job.device, Job.id, Job.owner)
        .join(Worker, Worker.id == Job.worker_id)
        .where(Job.status == "running", Job.device.is_not(None), Worker.hostname == socket.gethostname()),
        execution_options=OF_EVERYONE,
    )
    held = {
        gpu_id: row.id if session.shows(row.owner) else ANOTHER_KEYS_JOB
        for row in rows
        for gpu_id in gpus.ids_of(row.device)
    }
    seen = gpus.detected()
    return GpusResponse(
        available_gpus=[gpu.id for gpu in seen if gpu.id not in held],
        gpu_info=[
            GpuInfo(
                gpu_id=gpu.id,
                name=gpu.name,
                memory_total_bytes=gpu.memory_total_bytes,
                memory_used_bytes=gpu.memory_used_bytes,
                memory_total_gb=round(gpu.memory_total_bytes / GIB, 2),
                memory_used_gb=round(gpu.memory_used_bytes / GIB, 2),
                load=gpu.load,
                temperature_celsius=gpu.temperature_celsius,
                held_by=held.get(gpu.id),
            )
            for gpu in seen
        ],
        declared=[
            DeclaredGpu(gpu_id=int(device.id), name=device.name, memory_total_bytes=device.memory_bytes)
            for device in settings.declared_devices
        ],
    )


@router.get("/workers", summary="Workers, with their devices and jobs")
def list_workers(session: Reading) -> Page[WorkerResponse]:
    now = session.scalar(select(database_now())) or 0.0
    rows = session.scalars(select(Worker).order_by(Worker.id.desc())).all()
    jobs = session.execute(
        select(Job.worker_id, Job.id, Job.owner).where(Job.status == "running").order_by(Job.id),
        execution_options=OF_EVERYONE,
    )
    running: dict[str | None, list[str]] = {}
    for worker_id, job_id, owner in jobs:
        running.setdefault(worker_id, []).append(job_id if session.shows(owner) else ANOTHER_KEYS_JOB)
    data = [
        WorkerResponse(
            id=row.id,
            hostname=row.hostname,
            started_at=int(row.started_at),
            last_heartbeat_at=int(row.heartbeat_at),
            alive=row.heartbeat_at > now - SILENT_SECONDS,
            devices=row.devices,
            labels=row.labels,
            running=running.get(row.id, []),
        )
        for row in rows
    ]
    ids = [worker.id for worker in data]
    return Page(data=data, has_more=False, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
