"""Where a model is loaded: on a free GPU that it fits on, or on the CPU."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.contract.model_reference import ModelReference
from app.devices import gpus
from app.errors import Unavailable
from app.models import base_models
from app.planning.devices import Device
from app.settings import Settings
from workers.device_locks import DeviceLocks
from workers.slots import Slots
from workers.training.devices.host_memory import available_on_host

_LOOKING_SECONDS = 0.03
"""The longest that a worker usually takes to look for jobs; all answers wait meanwhile."""
_WAITS_EVERY_SECONDS = 1.0
"""The time between two such waits is at least this, whatever the number of GPUs and requests."""

_FULL = 0.9
"""The share of a device's memory that a model may take."""

_ROOM = 1.15
"""A model's memory, in relation to that of its weights."""

_BYTES_PER_PARAMETER = 2
"""Of a model whose files are not measured."""


@dataclass
class Place:
    """Where an engine computes."""

    device: Device | None
    """A GPU, or None for the CPU."""
    lock: int | None = None
    """The descriptor of the GPU's lock, which keeps trainers from it."""

    @property
    def torch_name(self) -> str:
        return "cuda" if self.device is not None else "cpu"

    def leave(self) -> None:
        """Gives the GPU back."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


class DoesNotFit(Exception):
    """There is not enough memory; the message says how much there is."""


@dataclass
class Placement:
    """Finds places for models on this machine."""

    settings: Settings
    locks: DeviceLocks
    slots: Slots
    training_needs_gpus: Callable[[], bool]
    """Whether training needs the GPUs."""
    _waits_again_at: float = 0.0

    def place(self, model: ModelReference) -> Place:
        """The place for a model.

        Raises:
            DoesNotFit: no device has enough memory.
        """
        needed = _ROOM * weight_bytes(model, self.settings)
        without_gpu = "no free GPU that is large enough"
        if self.settings.inference != "auto":
            without_gpu = "answers on CPUs only (ACCRUE_INFERENCE)"
        elif self.settings.inference_yields and self.training_needs_gpus():
            without_gpu = "needs its GPUs for training"
        else:
            for device in self.slots.usable():
                if device.kind == "cuda" and needed <= _FULL * device.memory_bytes:
                    lock = self._lock_of(device)
                    if lock is not None:
                        return Place(device, lock)
        free = available_on_host()
        if needed > _FULL * free:
            raise DoesNotFit(
                f"{model.name} needs about {needed / 2**30:.1f} GiB to answer, and this machine has "
                f"{free / 2**30:.1f} GiB of free memory, and {without_gpu}"
            )
        return Place(None)

    def _lock_of(self, device: Device) -> int | None:
        """The device's lock; None if the device is in use. A worker that looks for jobs holds the locks of
        free devices for a moment, so a lock is tried again now and then."""
        if (lock := self.locks.take(device)) is not None:
            return lock
        now = time.monotonic()
        if now < self._waits_again_at:
            return None
        self._waits_again_at = now + _WAITS_EVERY_SECONDS
        while (lock := self.locks.take(device)) is None and time.monotonic() < now + _LOOKING_SECONDS:
            time.sleep(0.01)
        return lock


def weight_bytes(model: ModelReference, settings: Settings) -> int:
    """The bytes of a model's weights: of its files or, if they are not in a folder of their own (those of the
    hub), of its parameters."""
    try:
        folder = Path(base_models.path_of(model, settings))
        found = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (ValueError, OSError, Unavailable):
        found = 0
    return found or _BYTES_PER_PARAMETER * model.architecture.parameters


def threads_of_cpu(settings: Settings) -> int:
    """The threads with which an engine computes on the CPU."""
    return settings.cpu_threads or gpus.cpu_threads()
