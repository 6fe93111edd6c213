"""Measures how long a device works, without waiting for it."""

import time

import torch


class Stopwatch:
    """The time between two places in the work of a device: a GPU's own time, or the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended = 0.0, 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Marks the beginning."""
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
        """The time between the marks. On a GPU, this waits until it has reached the end."""
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1000
