"""An engine's devices as slots for trainers."""

import threading
import time
from typing import Any

import structlog

from app.planning.devices import Device
from workers.executors.protocol import Executor, Unreachable
from workers.slots import Slots

log = structlog.get_logger("accrue.worker")

_ASK_SECONDS = 10.0
"""How often the engine is asked for its devices."""


class ExecutorSlots(Slots):
    """The devices that an engine offers. While it does not answer, no job is started."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(on_cpu=True)
        self._executor = executor
        self._offered: list[Device] = []
        self._reachable = False
        self._asked_at = float("-inf")
        self._asking: threading.Thread | None = None

    def available(self) -> list[Device]:
        self._ask()
        return self._offered

    def usable(self) -> list[Device]:
        self._ask()
        return self._offered if self._reachable else []

    def measure_contexts(self) -> None:
        """Waits for the engine's first answer: no process of this machine uses the devices."""
        self._ask()
        if self._asking is not None:
            self._asking.join(_ASK_SECONDS)

    def temperature(self, device: Device) -> float | None:
        return None

    def set_aside(self, device: Device, why: str) -> None:
        """Does nothing: the engine decides which node a job gets."""

    def has_failed(self, device: Device) -> bool:
        return False

    def is_gone(self, device: Device) -> bool:
        return False

    def _ask(self) -> None:
        """Asks the engine in a thread, unless it was asked recently or has not answered yet."""
        if time.monotonic() < self._asked_at + _ASK_SECONDS or (self._asking and self._asking.is_alive()):
            return
        self._asked_at = time.monotonic()
        self._asking = threading.Thread(target=self._refresh, daemon=True, name="offers")
        self._asking.start()

    def _refresh(self, *_: Any) -> None:
        try:
            self._offered, self._reachable = self._executor.devices(), True
        except Unreachable as error:
            if self._reachable or not self._offered:
                log.warning("the engine does not answer", engine=self._executor.name, error=str(error))
            self._reachable = False
