"""The devices to plan for: detected through GPUtil, declared, or recorded by workers."""

import math
import os
import subprocess
import threading
import time
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache

import structlog

from app.errors import Unprocessable
from app.planning.devices import MIB, Device

log = structlog.get_logger("accrue.gpus")

_FRESH_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class DetectedGpu:
    """A GPU as nvidia-smi reports it now; memory in bytes, load from 0 to 1."""

    id: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    load: float | None
    temperature_celsius: float | None
    compute_capability: float | None = None

    @property
    def device(self) -> Device:
        return Device(
            self.id, self.name, self.memory_total_bytes, "cuda", _expandable_segments(),
            self.compute_capability,
        )  # fmt: skip


class _GpuMonitor:
    """Caches nvidia-smi's output for a short time; while a call hangs, callers get the previous output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_at = -math.inf
        self._seen: list[DetectedGpu] = []
        self._asking: threading.Thread | None = None

    def look(self) -> list[DetectedGpu]:
        with self._lock:
            hangs = self._asking is not None and self._asking.is_alive()
            if not hangs and time.monotonic() - self._looked_at > _FRESH_SECONDS:
                self._looked_at = time.monotonic()
                self._asking = threading.Thread(target=self._ask, daemon=True, name="nvidia-smi")
                self._asking.start()
                self._asking.join(_TIMEOUT_SECONDS)
                if self._asking.is_alive():
                    log.warning("nvidia-smi does not answer", seconds=_TIMEOUT_SECONDS)
            return self._seen

    def _ask(self) -> None:
        try:
            self._seen = _ask()
        except (ValueError, IndexError, OSError) as error:
            log.warning("could not parse nvidia-smi's output", error=str(error)[:200])


_gauge = _GpuMonitor()


def detected() -> list[DetectedGpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; none without nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _gauge.look()
    if visible is None:
        return gpus
    allowed = {part.strip() for part in visible.split(",")}
    return [gpu for gpu in gpus if str(gpu.id) in allowed or gpu.uuid in allowed]


def this_cpu() -> Device:
    """This machine's processor, with its whole memory."""
    return Device("cpu", "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "cpu")


def cpu_devices(count: int) -> list[Device]:
    """This machine's processor as several devices, each with an equal part of the memory."""
    whole = this_cpu()
    if count == 1:
        return [whole]
    memory = whole.memory_bytes // count
    return [replace(whole, id=f"cpu:{number}", memory_bytes=memory) for number in range(count)]


def cpu_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ids_of(device: str | None) -> list[int]:
    """The GPUs of a job, from the name of its devices.

    >>> ids_of("cuda:0,2")
    [0, 2]
    """
    kind, _, ids = (device or "").partition(":")
    return [int(gpu_id) for gpu_id in ids.split(",")] if kind == "cuda" else []


def for_planning(declared: list[Device], of_workers: list[Device]) -> list[Device]:
    """The devices that plans are made for.

    Declared ones, else those detected here, else those of workers elsewhere, else this machine's CPU.
    """
    return declared or [gpu.device for gpu in detected()] or of_workers or [this_cpu()]


def _ask() -> list[DetectedGpu]:
    gpus = _gputil().getGPUs()
    capabilities = _compute_capabilities() if gpus else {}
    return [
        DetectedGpu(
            id=gpu.id,
            uuid=gpu.uuid,
            name=gpu.name,
            memory_total_bytes=int(gpu.memoryTotal) * MIB,
            memory_used_bytes=int(_number(gpu.memoryUsed) or 0) * MIB,
            load=_number(gpu.load),
            temperature_celsius=_number(gpu.temperature),
            compute_capability=capabilities.get(gpu.uuid),
        )
        for gpu in gpus
        if not math.isnan(gpu.memoryTotal)
    ]


@lru_cache
def _compute_capabilities() -> dict[str, float]:
    """Compute capabilities by UUID, which GPUtil does not report; empty if nvidia-smi is too old."""
    command = ["nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        ).stdout
        rows = [line.split(",") for line in output.splitlines()]
        return {uuid.strip(): float(capability) for uuid, capability in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


@lru_cache
def _gputil():  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPUtil imports distutils
        import GPUtil
        import setuptools  # noqa: F401  # brings distutils where Python has none
    return GPUtil


def _expandable_segments() -> bool:
    """Whether this environment turns on PyTorch's expandable segments; PyTorch reads either variable."""
    options = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in options.replace(" ", "").lower()


def _number(value: float) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def first_devices(count: int, available: list[Device]) -> list[Device]:
    """The first `count` devices; if there are fewer, the rest are assumed to be like the last one."""
    return [available[min(number, len(available) - 1)] for number in range(count)]


def select_devices(gpu_ids: list[int], available: list[Device]) -> list[Device]:
    """Devices by their ids.

    Raises:
        Unprocessable: an id is unknown; the message lists the available ones.
    """
    by_id = {device.id: device for device in available}
    unknown = [str(gpu_id) for gpu_id in gpu_ids if gpu_id not in by_id]
    if unknown:
        known = ", ".join(f"{device.id} ({device.name})" for device in available)
        raise Unprocessable(
            f"gpu_ids: no GPU {', '.join(unknown)}. Available: {known}. Declare devices to plan for "
            "with gpus, or with ACCRUE_GPUS=24GB,24GB.",
            field="gpu_ids",
        )
    return [by_id[gpu_id] for gpu_id in gpu_ids]
