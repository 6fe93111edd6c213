"""Memory of the trainer: allocated on a GPU, resident on a CPU. GiB."""

import os
import resource
from pathlib import Path

import torch

GIB = 2**30


def in_use_gb(device: torch.device) -> float:
    """Memory in use now."""
    if device.type == "cuda":
        return round(torch.cuda.memory_allocated(device) / GIB, 4)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / GIB, 4)


def peak_gb(device: torch.device) -> float:
    """The most memory in use since the process started."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / GIB, 4)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 4)
