"""Resource limits of a trainer, besides the memory that its plan allows."""

import contextlib
import os
import resource
from collections.abc import Iterator
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
    most = _mapped_bytes() + bytes_more
    if most > bytes_more:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextlib.contextmanager
def limited_memory(bytes_more: int) -> Iterator[None]:
    """Limits this process as `limit_memory` does, until the end of the block. A lower limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _mapped_bytes()
    limits = [mapped + bytes_more, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    if mapped:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mapped_bytes() -> int:
    """The size of this process's address space; 0 if the system does not show it (other than Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
