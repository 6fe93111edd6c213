"""Memory of the trainer: allocated on a GPU, resident on a CPU."""

import contextlib
import os
import resource
from pathlib import Path

import torch

GIB = 2**30


def in_use(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux
        return peak(device)
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(device: torch.device) -> int:
    """The maximum number of bytes in use since the process started, or since `reset_peak()`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved(device: torch.device) -> int | None:
    """The maximum number of bytes that PyTorch's allocator held on a GPU, since the same moment as `peak()`;
    None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Resets `peak()`, if the system supports this (Linux, CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def begin_steps(device: torch.device) -> None:
    """Resets `peak()` and `peak_reserved()` before steps whose memory is to be measured: on a GPU, cached
    memory of what came before counts no more."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)


class MemoryWatch:
    """Checks the host's memory against a limit, window by window; a GPU's limit is enforced by its
    allocator."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device, self._limit = device, limit_bytes
        self._can_be_checked = device.type == "cpu"

    def begin(self) -> None:
        """Resets a peak above the limit, such as that of loading the model."""
        if self._can_be_checked and peak(self._device) > self._limit:
            reset_peak(self._device)
            self._can_be_checked = peak(self._device) < self._limit or in_use(self._device) > self._limit

    def exceeded(self) -> bool:
        """Whether more than the limit was in use since `begin()`."""
        return self._can_be_checked and peak(self._device) > self._limit


def gib(count: int) -> float:
    """Bytes as GiB, rounded to about a hundred kilobytes."""
    return round(count / GIB, 4)
