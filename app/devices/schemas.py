"""GPUs and workers on the wire."""

from typing import Any, Literal

from app.contract.base import ResponseModel


class GpuInfo(ResponseModel):
    gpu_id: int | str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int | None
    memory_total_gb: float
    memory_used_gb: float | None
    load: float | None
    temperature_celsius: float | None
    held_by: str | None


class DeclaredGpu(ResponseModel):
    gpu_id: int
    name: str
    memory_total_bytes: int


class GpusResponse(ResponseModel):
    available_gpus: list[int | str]
    gpu_info: list[GpuInfo]
    declared: list[DeclaredGpu]


class WorkerResponse(ResponseModel):
    id: str
    object: Literal["worker"] = "worker"
    hostname: str
    started_at: int
    last_heartbeat_at: int
    alive: bool
    devices: list[dict[str, Any]]
    running: list[str]
    labels: dict[str, str]
