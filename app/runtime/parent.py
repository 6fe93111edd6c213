"""Ends a process when its parent ends, however the parent ends. Needs only the standard library."""

import contextlib
import ctypes
import os
import signal
import sys
import threading

PARENT_FD_VARIABLE = "ACCRUE_PARENT_FD"
"""Holds the descriptor of a pipe whose other end the parent holds: end of file means that the parent has
ended."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Sends SIGTERM to this process when its parent ends, if `processes.start` started it.

    When its terminal is closed (SIGHUP), it gets SIGTERM as well, unless nohup makes it ignore that.

    On every system, the pipe's end of file shows that the parent has ended; on Linux, the kernel sends the
    signal as well, at once.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    descriptor = os.environ.pop(PARENT_FD_VARIABLE, None)
    if descriptor is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(int(descriptor),), daemon=True, name="parent").start()


def _watch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
