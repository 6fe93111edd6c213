"""Checks whether the children of a killed process have ended."""

import contextlib
import os
import select
import time
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Descriptors of a process's children (pidfds); an empty list if the kernel has no pidfds.

    A child with its own PID namespace has ended only once all of its descendants have ended.
    """
    found = []
    with contextlib.suppress(OSError, AttributeError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                found.append(os.pidfd_open(int(child)))
    return found


def are_gone(descriptors: list[int]) -> bool:
    """Whether all of these processes have ended."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return len(waiting.poll(0)) == len(descriptors)


def wait_until_gone(descriptors: list[int], seconds: float) -> bool:
    """Waits for the end of these processes, and closes their descriptors. Returns whether all have ended."""
    until = time.monotonic() + seconds
    while not are_gone(descriptors) and time.monotonic() < until:
        time.sleep(0.01)
    gone = are_gone(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return gone
