"""Ends a rank that waits for another one for far longer than a window can take.

A rank that hangs neither ends nor fails, and the others would wait for it for ever. How long is too long is
known only while windows are trained; tokenising, evaluations and checkpoints can take any
amount of time.

A window's time is a sum of parts that grow with its micro-batches, with their tokens, and (in attention) with
their tokens times their length. So the largest of the three ratios between two windows is an upper bound for
the ratio of their times.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workers.run_directory import LOST_RANK

log = logging.getLogger("accrue.trainer")

_LEAST_SECONDS = 10.0
_TIMES = 10.0
"""A rank waits for `_LEAST_SECONDS` plus this many times the longest time that the window can take."""

_POLL_SECONDS = 0.5
_LOOKS = 2


def _end_process(message: str) -> None:
    log.error("%s", message)
    os._exit(LOST_RANK)  # the thread that waits cannot be interrupted


@dataclass(frozen=True)
class WindowSize:
    """What a window's time depends on: that of its most expensive rank."""

    micro_batches: float
    tokens: float
    """Padded tokens."""
    pairs: float
    """Padded tokens times the length of their rows."""

    def relative_to(self, other: "WindowSize") -> float:
        """An upper bound for this window's time divided by the other's."""
        return max(
            self.micro_batches / max(1.0, other.micro_batches),
            self.tokens / max(1.0, other.tokens),
            self.pairs / max(1.0, other.pairs),
        )


class RankTimeout:
    """How long a rank waits for the others.

    Args:
        give_up: called, in another thread, after waiting for too long.
    """

    def __init__(self, give_up: Callable[[str], None] = _end_process) -> None:
        self._give_up = give_up
        self._longest: tuple[float, WindowSize] | None = None
        self._limit: float | None = None
        self._deadline: float | None = None
        self._suspended = 0.0
        """Seconds for which this process was suspended. They do not count as waiting, since the other ranks
        may have been suspended with it."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _clock(self) -> float:
        """Seconds for which this process has run."""
        return time.monotonic() - self._suspended

    @contextlib.contextmanager
    def limited_waiting(self, size: WindowSize) -> Iterator[None]:
        """Limits waiting within the block, once the time of another window is known."""
        if self._longest is not None:
            seconds, known = self._longest
            self._limit = _LEAST_SECONDS + _TIMES * seconds * max(1.0, size.relative_to(known))
        try:
            yield
        finally:
            self._limit = None

    def note_window(self, seconds: float, size: WindowSize) -> None:
        """Notes how long a window took."""
        if self._longest is None or seconds > self._longest[0]:
            self._longest = seconds, size

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Gives up if the block takes too long. A block within another one has the time limit of the
        whole."""
        if self._deadline is not None:
            yield
            return
        self._deadline = None if self._limit is None else self._clock() + self._limit
        try:
            yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        late, looked_at = 0, time.monotonic()
        while late < _LOOKS:
            time.sleep(_POLL_SECONDS)
            before, looked_at = looked_at, time.monotonic()
            self._suspended += max(0.0, looked_at - before - _POLL_SECONDS)
            deadline = self._deadline
            late = late + 1 if deadline is not None and self._clock() > deadline else 0
        self._give_up(f"another rank did not answer for {self._limit or 0.0:.0f} s")
