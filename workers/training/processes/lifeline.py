"""Ends a trainer when its supervisor ends, however the supervisor ends.

The kernel's parent-death signal acts at once on Linux; an inherited pipe, whose other end dies with the
supervisor, acts everywhere. If the supervisor has promised to send data on that pipe regularly, its silence
ends the process as well.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass

from workers.run_directory import LIFELINE_VARIABLE, SILENCE_VARIABLE

_DIE_WITH_PARENT = 1
"""An option of prctl(2)."""

_POLL_SECONDS = 0.1
"""The polling interval for the end of a child, on kernels that do not report it."""

_ENDS_WITHIN_SECONDS = 10.0
"""How long a killed child is waited for; after that, it is left to the kernel."""


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends. A change of
    capabilities clears this setting."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, by, 0, 0, 0)


def end_with_supervisor() -> None:
    """Ends this process with the supervisor that started it; does nothing when started by hand."""
    lifeline = inherited()
    if lifeline is not None:
        die_with_parent()
        threading.Thread(target=lifeline.watch, daemon=True, name="lifeline").start()


def inherited() -> "Lifeline | None":
    """The lifeline that the supervisor passed on; None if this process was started by hand."""
    descriptor, silence = os.environ.get(LIFELINE_VARIABLE), os.environ.get(SILENCE_VARIABLE)
    if descriptor is None:
        return None
    return Lifeline(int(descriptor), float(silence) if silence is not None else None)


@dataclass(frozen=True)
class Lifeline:
    """A pipe from the supervisor."""

    descriptor: int
    timeout_seconds: float | None
    """Seconds of silence after which the process ends; None waits only for the end of the pipe."""

    def watch(self) -> None:
        """Ends this process when the supervisor is gone. Does not return."""
        with contextlib.suppress(OSError):
            while select.select([self.descriptor], [], [], self.timeout_seconds)[0] and self._heard():
                pass
        os._exit(1)

    def watch_until_end_of_child(self, child: int, *, ends_by: int = signal.SIGKILL) -> None:
        """Watches the lifeline until a child has ended; the caller still has to wait for the child.

        If the supervisor is gone, it ends the child by a signal, then this process. It uses no thread,
        since a process whose children have their own PID namespace cannot start one.
        """
        last_sign_at = time.monotonic()
        end = _end_of(child)
        while not _has_ended(child):
            ready = select.select(
                [self.descriptor, *end], [], [], self._seconds_left(last_sign_at) if end else _POLL_SECONDS
            )[0]
            if self.descriptor in ready:
                if not self._heard():
                    _end_with(child, ends_by)
                last_sign_at = time.monotonic()
            elif self._seconds_left(last_sign_at) == 0.0:
                _end_with(child, ends_by)
        for descriptor in end:
            os.close(descriptor)

    def _heard(self) -> bool:
        return bool(os.read(self.descriptor, 4096))

    def _seconds_left(self, last_sign_at: float) -> float | None:
        if self.timeout_seconds is None:
            return None
        return max(0.0, last_sign_at + self.timeout_seconds - time.monotonic())


def _end_with(child: int, by: int) -> None:
    """Ends a child, with everything that it has started, and this process."""
    with contextlib.suppress(OSError):
        os.kill(child, by)
        until = time.monotonic() + _ENDS_WITHIN_SECONDS
        while not _has_ended(child) and time.monotonic() < until:
            time.sleep(0.01)
    os._exit(1)


def _end_of(child: int) -> list[int]:
    """A descriptor that is readable once the child has ended; an empty list if the kernel has no pidfds."""
    try:
        return [os.pidfd_open(child)]
    except (AttributeError, OSError):
        return []


def _has_ended(child: int) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child, options) is not None
