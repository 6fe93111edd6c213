"""Ends a process's loop on SIGTERM or Ctrl-C."""

import signal
from types import FrameType


class StopSignals:
    """Remembers that the process has to stop; to be made in the main thread."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
