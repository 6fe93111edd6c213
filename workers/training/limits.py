"""Resource limits of a trainer, besides the memory that its plan allows."""

import os
import resource
from pathlib import Path

OPEN_FILES = 4096
"""Many times what a trainer opens: shards, samples, checkpoints."""


def limit() -> None:
    """Sets limits for this process and those that it starts.

    Core dumps are disabled, since they would put training text and weights outside of the data folder. The
    number of open files is limited, so that a leak of them ends this job and does not affect the machine's
    others.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def limit_memory(bytes_more: int) -> None:
    """Limits this process to `bytes_more` bytes in addition to what it has mapped already. With many
    processors, it may have mapped gigabytes that it does not use."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux
        return
    most = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + bytes_more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
