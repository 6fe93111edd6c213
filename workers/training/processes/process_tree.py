"""Runs work in a process tree of its own, which sees no other process and leaves none behind.

    this process    passes signals on, and ends as the work ended
      └─ init       PID 1 of the tree: when it ends, the kernel ends everything below it
           └─ work

If the machine does not support PID namespaces (systems other than Linux, some containers), init kills its
remaining descendants instead.
"""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workers.training.processes.lifeline import Lifeline, die_with_parent

log = logging.getLogger("accrue.trainer")

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PROCESS_IDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
"""Flags of unshare(2)."""
_NO_SUID, _NO_DEV, _NO_EXEC, _RECURSIVE, _PRIVATE = 2, 4, 8, 16384, 1 << 18
"""Flags of mount(2)."""
_ADOPT_ORPHANS = 36
"""An option of prctl(2)."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
_FATAL_SIGNALS = {
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT,
    signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGTERM,
    signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS,
}  # fmt: skip
"""Signals that end this process as they ended the work; after others, it exits with the work's status."""
_SIGNALLED = 128
"""Added to a signal's number in init's exit status, as shells do."""

_END_ALL = signal.SIGUSR1
"""The signal that init gets instead of SIGKILL when its parent ends, if it must kill its descendants
itself."""

Work = Callable[[], int]


def run_sandboxed(work: Callable[[bool], int], *, isolated: bool, lifeline: Lifeline | None = None) -> int:
    """Runs work in its own process tree. Call this before a second thread is started.

    If a signal ended the work, this process ends by the same signal.

    Args:
        work: returns the exit status; its argument is whether it has its own mounts and process ids.
        isolated: whether the work should have mounts and process ids of its own, if the machine allows it.
        lifeline: what ends this process and the work, besides the end of the process that started this one.

    Returns:
        The exit status.
    """
    own = isolated and _own_namespaces()
    if not own:
        _adopt_orphans()
    with _signals_blocked():
        dies_by = signal.SIGKILL if own else _END_ALL
        init = _fork(lambda: _init(lambda: work(own), own=own), dies_by=dies_by)
        _pass_on(init)
    die_with_parent()
    if lifeline is not None:
        lifeline.watch_until_end_of_child(init, ends_by=dies_by)
    status = _wait_for(init)
    if not own:
        _end_orphans()
    end_as(status if status < 0 else _SIGNALLED - status)
    return status


def end_as(status: int) -> None:
    """Ends this process by the signal that ended another one; does nothing if that ended in another way.

    Args:
        status: the other process's exit status, negative after a signal.
    """
    if -status in _FATAL_SIGNALS:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)


def in_a_child(work: Work) -> int:
    """Runs `work` in a child process that ends with this one. SIGTERM and SIGINT end the child, and are then
    handled here, too.

    Returns:
        Its exit status, negative after a signal.
    """
    received: list[int] = []
    with _signals_blocked():
        child = _fork(lambda: _ended_by_signals(work))
        before = _pass_on(child, received)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def _ended_by_signals(work: Work) -> int:
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    return work()


def _init(work: Work, *, own: bool) -> int:
    """Waits for the work, and for the orphans that it leaves."""
    os.setsid()  # a signal to the work's own process group reaches nothing outside
    os.closerange(
        3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )  # only the outermost process keeps locks and pipes
    if own:
        flags = ctypes.c_ulong(_NO_SUID | _NO_DEV | _NO_EXEC)
        if ctypes.CDLL(None).mount(b"proc", b"/proc", b"proc", flags, None) != 0:  # a container may forbid it
            log.info("the trainer sees other processes: /proc cannot be mounted")
    else:
        _adopt_orphans()
        signal.signal(_END_ALL, _end_all)
    with _signals_blocked():
        child = _fork(lambda: _without_end_all(work))
        _pass_on(child)
    status = _wait_for(child)
    if not own:
        _end_orphans()
    return status if status >= 0 else _SIGNALLED - status


def _without_end_all(work: Work) -> int:
    signal.signal(_END_ALL, signal.SIG_DFL)
    return work()


def _fork(work: Work, *, dies_by: int = signal.SIGKILL) -> int:
    """Does work in a child process that ends with this one, even if this one ends right now.

    Args:
        dies_by: the signal that the child gets when this process ends.

    Returns:
        The child's process id.
    """
    ready, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        die_with_parent(dies_by)
        try:
            os.write(alive, b".")
        except OSError:  # the parent ended before its end could be noticed
            os._exit(1)
        os.close(alive)
        _end(work)
    os.close(alive)
    os.read(ready, 1)
    os.close(ready)
    return child


def _end(work: Work) -> None:
    """Does work in a child that was just forked, and ends it."""
    status = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait_for(child: int) -> int:
    """Waits for a child and returns its exit status; adopted children that end meanwhile are reaped."""
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _end_all(number: int, frame: object) -> None:
    """Handles the end of init's parent."""
    _end_orphans()  # the work is one of init's children, too
    os._exit(1)


def _adopt_orphans() -> None:
    """Makes descendants whose parents have ended children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def _end_orphans() -> None:
    """Kills adopted descendants, until none is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        while found := children.read_text().split():
            for child in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks the signals that are passed on, until their receiver is known."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def _pass_on(child: int, received: list[int] | None = None) -> dict[int, Any]:
    """Passes signals on to a child, and notes them in `received`. Returns the previous handlers."""

    def pass_on(number: int, frame: object) -> None:
        if received is not None:
            received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    return {number: signal.signal(number, pass_on) for number in _PASSED_ON}


def _own_namespaces() -> bool:
    """Gives this process its own mounts, and its children their own process ids.

    A child tries this first: some systems allow the first step but forbid the others, and no step can be
    undone.
    """
    if sys.platform != "linux":
        return False
    status = in_a_child(_try_namespaces)
    end_as(status)  # rather than go on without isolation
    if status != 0:
        return False
    _enter_namespaces()
    return True


def _try_namespaces() -> int:
    try:
        _enter_namespaces()
    except OSError as error:
        log.info("the trainer cannot have its own namespaces: %s", error.strerror)
        return 1
    return 0


def _enter_namespaces() -> None:
    """Enters new namespaces for mounts, IPC and process ids.

    Raises:
        OSError: this machine does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESS_IDS | (0 if user == 0 else _NEW_USER)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "/")
