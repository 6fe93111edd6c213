"""Ends a rank that waits for another one for far longer than a window takes.

A rank that hangs neither ends nor fails, and the others would wait for it for ever. How long is too long is
known only while windows are trained; tokenising, evaluations and checkpoints may take any time.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from workers.run_directory import LOST_RANK

log = logging.getLogger("accrue.trainer")

_LEAST_SECONDS = 10.0
_WINDOWS = 10.0
"""Besides the least, a rank waits for as long as this many of the longest window so far."""

_LOOK_EVERY_SECONDS = 0.5
_LOOKS = 2


def _end_process(message: str) -> None:
    log.error("%s", message)
    os._exit(LOST_RANK)  # the thread that waits cannot be interrupted


class Patience:
    """How long a rank waits for the others.

    Args:
        give_up: called, in another thread, after waiting for too long.
    """

    def __init__(self, give_up: Callable[[str], None] = _end_process) -> None:
        self._give_up = give_up
        self._longest = 0.0
        self._limit: float | None = None
        self._deadline: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Limits waiting within the block, once the length of a window is known."""
        self._limit = _LEAST_SECONDS + _WINDOWS * self._longest if self._longest else None
        try:
            yield
        finally:
            self._limit = None

    def note_window(self, seconds: float) -> None:
        """Notes how long a window took."""
        self._longest = max(self._longest, seconds)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Gives up if the block takes too long."""
        self._deadline = None if self._limit is None else time.monotonic() + self._limit
        try:
            yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        late = 0
        while late < _LOOKS:  # the first look may be late itself, if all ranks were suspended
            time.sleep(_LOOK_EVERY_SECONDS)
            deadline = self._deadline
            late = late + 1 if deadline is not None and time.monotonic() > deadline else 0
        self._give_up(f"another rank did not answer for {self._limit or 0.0:.0f} s")
