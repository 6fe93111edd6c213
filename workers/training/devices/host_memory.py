"""The memory of this machine that is free."""

import contextlib
from math import inf
from pathlib import Path


def available_on_host() -> float:
    """Bytes of the host's memory that can be taken without swapping, and within the limit of this process's
    container; infinite if the system does not say."""
    free = inf
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return min(free, available_in(Path("/sys/fs/cgroup")))


def available_in(group: Path) -> float:
    """Bytes that a control group (version 2) may still take; memory that only caches files counts as free.
    Infinite without a limit."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        most = int((group / "memory.max").read_text())  # "max" is no number
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        return float(max(0, most - used))
    return inf
