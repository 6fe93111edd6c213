"""This machine's devices as slots for trainers, and the devices that are temporarily excluded."""

import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from app.devices import gpus
from app.planning.devices import Device
from workers.cuda_context import ContextSizes
from workers.trainer_process import gpu_works

log = structlog.get_logger("accrue.worker")

ASIDE_SECONDS = 600.0
"""Seconds after which a GPU that failed is tried again."""

_MISSED_SECONDS = 30.0
"""A GPU that nvidia-smi has not shown for this many seconds counts as gone. If it is missing for less time,
nvidia-smi may just have failed to answer."""


_SILENT_SECONDS = 60.0
"""Seconds without an answer of nvidia-smi after which no job is started on a GPU."""


def labels_of(devices: Sequence[Device]) -> dict[str, str]:
    """The labels that every worker has: `hostname`, and `gpu_type`, the name of its GPUs, or cpu. If they are
    of several types, `gpu_type` is missing."""
    types = {device.name if device.kind == "cuda" else "cpu" for device in devices}
    known = {"hostname": socket.gethostname()}
    return known | {"gpu_type": "".join(types)} if len(types) == 1 else known


class Slots:
    """A slot for each GPU, or for each CPU device if there was no GPU at the start.

    This is decided only once: if a GPU disappears for a moment, the worker does not switch to the CPU.
    """

    def __init__(self, *, on_cpu: bool | None = None, cpu_devices: int = 1) -> None:
        self._cpu_devices = cpu_devices
        self._on_cpu = not gpus.detected_at_start() if on_cpu is None else on_cpu
        self._contexts = ContextSizes()
        self._aside_until: dict[int | str, float] = {}
        self._seen_at: dict[int | str, float] = {}

    def available(self) -> list[Device]:
        """Every device that answers."""
        if self._on_cpu:
            found = gpus.cpu_devices(self._cpu_devices)
        else:
            found = [self._with_context(gpu.device) for gpu in gpus.detected()]
        self._seen_at |= {device.id: time.monotonic() for device in found}
        return found

    def measure_contexts(self) -> None:
        """Measures what a process holds on each kind of GPU besides its tensors, which takes some seconds."""
        self._contexts.measure(self.available())

    def _with_context(self, device: Device) -> Device:
        return replace(device, context_bytes=self._contexts.of(device))

    def usable(self) -> list[Device]:
        """Devices that are not set aside because a trainer failed on them recently or they were too hot.
        While nvidia-smi does not answer, no GPU is usable: one of them may be lost."""
        now = time.monotonic()
        if not self._on_cpu and gpus.silent_seconds() > _SILENT_SECONDS:
            return []
        return [device for device in self.available() if self._aside_until.get(device.id, 0.0) <= now]

    def temperature(self, device: Device) -> float | None:
        """A GPU's recent temperature in degrees Celsius, or None if unknown, as for a CPU."""
        if device.kind == "cpu":
            return None
        return next((gpu.temperature_celsius for gpu in gpus.detected() if gpu.id == device.id), None)

    def set_aside(self, device: Device, why: str) -> None:
        """Gives a device no job for a while."""
        log.error("device set aside", device=device.name, id=device.id, why=why, seconds=ASIDE_SECONDS)
        self._aside_until[device.id] = time.monotonic() + ASIDE_SECONDS

    def has_failed(self, device: Device) -> bool:
        """Whether a GPU that a trainer reports as lost has really failed; a CPU never has."""
        if device.kind == "cpu":
            return False
        return not any(other.id == device.id for other in self.available()) or not gpu_works(device)

    def is_gone(self, device: Device) -> bool:
        """Whether a device that was there has not been seen for some time."""
        if any(other.id == device.id for other in self.available()):
            return False
        return time.monotonic() - self._seen_at.get(device.id, 0.0) > _MISSED_SECONDS
