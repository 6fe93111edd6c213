"""A trainer does not outlive its supervisor, however that one ends."""

import contextlib
import ctypes
import os
import signal
import sys
import threading

from workers.run_directory import LIFELINE_VARIABLE

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ends this process with the supervisor that started it; does nothing when started by hand.

    The kernel's parent-death signal acts at once on Linux; the inherited pipe, whose other end dies
    with the supervisor, also ends what has other parents: the ranks below a launcher.
    """
    descriptor = os.environ.get(LIFELINE_VARIABLE)
    if descriptor is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(int(descriptor),), daemon=True, name="lifeline").start()


def _watch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):
            pass
    os._exit(1)
