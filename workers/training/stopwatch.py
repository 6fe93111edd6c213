"""Measures how long a device works, without waiting for it."""

import time

import torch


class Stopwatch:
    """The time between two places in the work of a device: a GPU's own time, or the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended, self._used = 0.0, 0.0, False
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
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
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        else:
            self._began = self._ended = time.perf_counter()

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
