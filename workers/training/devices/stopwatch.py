"""Measures how long a device works, without waiting for it."""

import time
from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """One micro-batch: its padded tokens, and the device's time from the end of the previous micro-batch to
    the end of this one."""

    tokens: int
    seconds: float


class Stopwatch:
    """The time between two places in the work of a device: a GPU's own time, or the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended, self._used = 0.0, 0.0, False
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._laps: list[torch.cuda.Event] = []
        self._lap_tokens: list[int] = []
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    @property
    def lags(self) -> bool:
        """Whether the device reaches the marks after the host."""
        return self._events is not None

    def reset(self) -> None:
        """Forgets the marks."""
        self._used = False

    def begin(self) -> None:
        """Marks the beginning."""
        self._used = True
        self._lap_tokens = []
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        else:
            self._began = self._ended = time.perf_counter()

    def lap(self, tokens: int) -> None:
        """Marks the end of a micro-batch with this number of padded tokens. Does nothing on a CPU."""
        if not self._events:
            return
        if len(self._laps) == len(self._lap_tokens):
            self._laps.append(torch.cuda.Event(enable_timing=True))
        self._laps[len(self._lap_tokens)].record(torch.cuda.current_stream(self._device))
        self._lap_tokens.append(tokens)

    def laps(self) -> tuple[Lap, ...]:
        """The micro-batches since the beginning; none on a CPU. Waits until the device has reached the last
        mark."""
        if not self._events or not self._used or not self._lap_tokens:
            return ()
        marks = [self._events[0], *self._laps[: len(self._lap_tokens)]]
        marks[-1].synchronize()
        return tuple(
            Lap(tokens, before.elapsed_time(after) / 1000)
            for tokens, before, after in zip(self._lap_tokens, marks, marks[1:], strict=False)
        )

    def end(self) -> None:
        """Marks the end."""
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))
        else:
            self._ended = time.perf_counter()

    def seconds(self) -> float:
        """The time between the marks; 0 without any. On a GPU, this waits until it has reached the end."""
        if not self._used:
            return 0.0
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1000
