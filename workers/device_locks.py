"""One process uses a device at a time, even with several workers: a trainer or, on a GPU, an inference
engine. On the CPU, inference engines take no lock.

On this machine, the trainer, not the worker, holds the lock, which it inherits: the lock is free as soon as
the trainer has ended, even if the worker is suspended and cannot release anything. The worker itself holds
the locks of the devices that it uses in Slurm, Ray or Kubernetes.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import structlog

from app.planning.devices import Device
from app.settings import Settings

log = structlog.get_logger("accrue.worker")


class DeviceLocks:
    """The locks of this machine's devices.

    A GPU has one lock per machine, so that workers of other services wait for it too. A CPU device has
    one lock per data folder and machine: all services share the processors, but two workers of one service
    take turns.
    """

    def __init__(self, settings: Settings) -> None:
        self._gpus = Path(tempfile.gettempdir()) / f"accrue-{os.getuid()}"
        self._cpu = settings.data_dir.absolute()
        self._logged: set[int | str] = set()

    def take(self, device: Device) -> int | None:
        """Takes a device's lock and returns its descriptor; the lock is held while any process has that open.

        Returns None if another process uses the device, to train or to answer requests, and logs this once.
        """
        path = self._path(device)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if device.id not in self._logged:
                self._logged.add(device.id)
                log.info(
                    "another process of Accrue uses the device",
                    device=device.name,
                    id=device.id,
                    lock=str(path),
                )
            return None
        self._logged.discard(device.id)
        return descriptor

    def _path(self, device: Device) -> Path:
        if isinstance(device.id, str):  # a processor, or a device of an engine
            return self._cpu / f".device-{str(device.id).replace(':', '')}-{socket.gethostname()}"
        self._gpus.mkdir(mode=0o700, exist_ok=True)
        return self._gpus / f"device-{device.id}"
