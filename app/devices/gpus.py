"""The devices to plan for: detected through GPUtil, declared, or recorded by workers."""

import math
import os
import re
import shutil
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
_MAX_SECONDS_AT_START, _MAX_FAILURES_AT_START = 60.0, 3


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
    part_of: tuple[int, str] | None = None
    """The number and UUID of the GPU that a slice (MIG) is a part of."""

    @property
    def device(self) -> Device:
        return Device(
            self.id, self.name, self.memory_total_bytes, "cuda", _expandable_segments(),
            self.compute_capability, self.uuid,
        )  # fmt: skip


class _GpuMonitor:
    """Caches nvidia-smi's output for a short time; while a call hangs, callers get the previous output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_at = -math.inf
        self._answered_at = math.inf
        self._seen: list[DetectedGpu] = []
        self._asking: threading.Thread | None = None

    def look(self) -> list[DetectedGpu]:
        with self._lock:
            if not self.hangs and time.monotonic() - self._looked_at > _FRESH_SECONDS:
                self._looked_at = time.monotonic()
                self._asking = threading.Thread(target=self._ask, daemon=True, name="nvidia-smi")
                self._asking.start()
                self._asking.join(_TIMEOUT_SECONDS)
                if self._asking.is_alive():
                    log.warning("nvidia-smi does not answer", seconds=_TIMEOUT_SECONDS)
            return self._seen

    @property
    def hangs(self) -> bool:
        """Whether nvidia-smi has been called, and has not ended yet."""
        return self._asking is not None and self._asking.is_alive()

    @property
    def has_answered(self) -> bool:
        return self._answered_at < math.inf

    def silent_seconds(self) -> float:
        """How long ago nvidia-smi last answered; 0 if it never has."""
        return max(0.0, time.monotonic() - self._answered_at)

    def _ask(self) -> None:
        try:
            self._seen = _ask()
            self._answered_at = time.monotonic()
        except (ValueError, IndexError, OSError, ArithmeticError) as error:
            log.warning("could not parse nvidia-smi's output", error=str(error)[:200])


_gauge = _GpuMonitor()


def detected() -> list[DetectedGpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; none without nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _gauge.look()
    return gpus if visible is None else _named(visible, gpus)


def silent_seconds() -> float:
    """Seconds since nvidia-smi last answered; 0 if it has shown no GPU. Its last answer is used until it
    answers again."""
    return _gauge.silent_seconds() if _gauge.look() else 0.0


def _named(visible: str, gpus: list[DetectedGpu]) -> list[DetectedGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by number, or by the beginning of a UUID. As for CUDA itself,
    a name without a GPU ends the list (CUDA C++ Programming Guide, section on environment variables)."""
    named: list[DetectedGpu] = []
    for name in map(str.strip, visible.split(",")):
        found = [gpu for gpu in gpus if _is_named(name, gpu.id, gpu.uuid)]
        slices = [gpu for gpu in gpus if gpu.part_of is not None and _is_named(name, *gpu.part_of)]
        if len(found) > 1 or not (found or slices):
            break
        named += found or slices[:1]  # CUDA uses the first slice of a GPU that is divided
    return [gpu for gpu in gpus if gpu in named]


def _is_named(name: str, number: int, uuid: str) -> bool:
    return name == str(number) or (name.startswith(("GPU-", "MIG-")) and uuid.startswith(name))


def detected_at_start() -> list[DetectedGpu]:
    """The GPUs of this machine, for which it waits if nvidia-smi is slow at first: without persistence mode,
    it loads the driver."""
    began, failures = time.monotonic(), 0
    while True:
        found = detected()
        if found or _gauge.has_answered or shutil.which("nvidia-smi") is None:
            break
        failures += not _gauge.hangs
        if failures == _MAX_FAILURES_AT_START or time.monotonic() - began > _MAX_SECONDS_AT_START:
            break
        time.sleep(_FRESH_SECONDS)
    if not found and _gauge.look():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        log.warning("CUDA_VISIBLE_DEVICES names no GPU of this machine", value=visible)
    return found


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
    here = [gpu.device for gpu in detected()]
    return declared or _with_contexts(here, of_workers) or of_workers or [this_cpu()]


def _with_contexts(devices: list[Device], of_workers: list[Device]) -> list[Device]:
    """Devices with the size of a context that a worker has measured on a GPU of the same name."""
    known = {device.name: device.context_bytes for device in of_workers if device.context_bytes is not None}
    return [replace(device, context_bytes=known.get(device.name)) for device in devices]


def _ask() -> list[DetectedGpu]:
    gpus = _gputil().getGPUs()
    capabilities = _compute_capabilities() if gpus else {}
    whole = [
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
        if _number(gpu.memoryTotal)
    ]
    return _with_slices(whole, _slices()) if whole else []


@dataclass(frozen=True)
class _Slice:
    """A part of a GPU as a device of its own (NVIDIA's Multi-Instance GPU)."""

    gpu_uuid: str
    uuid: str
    profile: str
    """Its size, such as 1g.10gb."""

    @property
    def memory_bytes(self) -> int:
        """Its memory. A profile of 10gb has 9.5 GiB; that of larger ones is up to 3 % more than this share
        (NVIDIA's MIG user guide, tables of profiles)."""
        size = re.search(r"(\d+)gb", self.profile)
        return int(int(size[1]) * 0.95 * 1024) * MIB if size else 0


def _with_slices(whole: list[DetectedGpu], slices: list[_Slice]) -> list[DetectedGpu]:
    """The GPUs; of those that are divided, their slices instead, numbered after the last GPU."""
    by_uuid = {gpu.uuid: gpu for gpu in whole}
    known = [own for own in slices if own.gpu_uuid in by_uuid and own.memory_bytes]
    divided = {own.gpu_uuid for own in known}
    first = max(gpu.id for gpu in whole) + 1
    return [
        *(gpu for gpu in whole if gpu.uuid not in divided),
        *(
            replace(
                by_uuid[own.gpu_uuid],
                id=first + number,
                uuid=own.uuid,
                name=f"{by_uuid[own.gpu_uuid].name} MIG {own.profile}",
                memory_total_bytes=own.memory_bytes,
                memory_used_bytes=0,  # nvidia-smi reports that of the whole GPU
                load=None,
                part_of=(by_uuid[own.gpu_uuid].id, own.gpu_uuid),
            )
            for number, own in enumerate(known)
        ),
    ]


def _slices() -> list[_Slice]:
    """The slices that `nvidia-smi -L` lists below each GPU.

    Raises:
        ValueError: it fails, so that a divided GPU would look like a whole one.
    """
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_MAX_SECONDS_AT_START, check=True
        ).stdout
    except subprocess.SubprocessError as error:
        raise ValueError("nvidia-smi -L failed: run it to see why") from error
    found, gpu = [], ""
    for line in listed.splitlines():
        uuid = re.search(r"UUID: ([^)\s]+)\)", line)
        if uuid is None:
            continue
        profile = re.match(r"\s*MIG (\S+)\s+Device", line)
        if profile is None:
            gpu = uuid[1]
        else:
            found.append(_Slice(gpu, uuid[1], profile[1]))
    return found


@lru_cache
def _compute_capabilities() -> dict[str, float]:
    """Compute capabilities by UUID, which GPUtil does not report; empty if nvidia-smi is too old."""
    command = ["nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_MAX_SECONDS_AT_START, check=True
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
    """Whether trainers use PyTorch's expandable segments: they do, unless this environment sets the
    allocator's options without them. PyTorch reads either variable."""
    options = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    return options is None or "expandable_segments:true" in options.replace(" ", "").lower()


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
            f"gpu_ids: no GPU {', '.join(unknown)}. Available: {known}. To plan for other devices, "
            "declare them: in the field gpus, or as ACCRUE_GPUS=24GB,24GB.",
            field="gpu_ids",
        )
    return [by_id[gpu_id] for gpu_id in gpu_ids]
