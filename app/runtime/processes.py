"""Service and worker as processes of their own, started and ended together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import IO

from app import PACKAGE_PREFIX
from app.errors import BadSetting
from app.runtime import parent

_LIFELINES: dict[int, int] = {}
"""By the id of each process started here, the write end of the pipe that it watches. The pipe closes when
this process ends."""

_END_SECONDS = 45.0
"""How long service and worker may take to end; longer than a small trainer's grace for its checkpoint."""

_WORKER_SECONDS = 24 * 3600.0
"""How long `accrue up` waits for the worker to end; the worker itself kills trainers that take too long to
write their checkpoints."""

_NOTICE_SECONDS = 5.0
"""After this time, `accrue up` says what it waits for."""

_SEPARATE_SECONDS = 1.0
"""Signals that follow each other faster than this count as one: a process may receive them as one, and a
closing terminal and its shell send one each."""


def check_port(host: str, port: int) -> None:
    """Checks that the service can listen on a port.

    Raises:
        BadSetting: another process listens on that port, or the host is unknown.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise BadSetting(f"ACCRUE_HOST: {host} is not an address of this machine.") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise BadSetting(
                f"cannot listen on {host}:{port} ({error.strerror}): set ACCRUE_PORT to another port, and "
                "ACCRUE_URL for the accrue command."
            ) from None


def start(
    part: str, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `accrue serve` or `accrue worker` in a session of its own; this process passes Ctrl-C on to it.

    The new process ends when this process or the calling thread ends.

    Args:
        env: the environment; ours if null.
        log: where its output goes; ours if null.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE_PREFIX}app.cli", part],
            env={**(os.environ if env is None else env), parent.PARENT_FD_VARIABLE: str(theirs)},
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[theirs],
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    _LIFELINES[process.pid] = ours
    return process


def end(
    processes: Mapping[subprocess.Popen[bytes], float] | Sequence[subprocess.Popen[bytes]],
    further_signals: Callable[[], int] = lambda: 0,
) -> None:
    """Sends SIGTERM to each process, and SIGKILL to those that still run after a while.

    Args:
        processes: those to end, perhaps with the seconds that each may take.
        further_signals: how many further signals have arrived so far. After the first, processes get another
            SIGTERM, which makes a worker kill its trainers; after the second, SIGKILL.
    """
    limits = processes if isinstance(processes, Mapping) else dict.fromkeys(processes, _END_SECONDS)
    began = signalled_at = time.monotonic()
    is_hurried = is_noticed = False
    _terminate(limits)
    while any(process.poll() is None for process in limits):
        now = time.monotonic()
        for process, seconds in limits.items():
            if now - began > seconds or further_signals() > 1:
                process.kill()
        if further_signals() and not is_hurried and now - signalled_at > _SEPARATE_SECONDS:
            is_hurried = True
            _terminate(limits)
        if now - began > _NOTICE_SECONDS and not is_noticed and max(limits.values()) > _END_SECONDS:
            is_noticed = True
            with contextlib.suppress(OSError):  # the terminal may be closed
                print("accrue: trainers are writing their checkpoints; Ctrl-C ends them at once, and their "
                      "jobs continue from earlier checkpoints", file=sys.stderr, flush=True)  # fmt: skip
        time.sleep(0.05)
    for process in limits:
        if (lifeline := _LIFELINES.pop(process.pid, None)) is not None:
            os.close(lifeline)


def _terminate(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


def up() -> int:
    """Runs the service and the worker until a signal arrives or one of them ends. Returns the exit status.

    While they end, another signal makes the worker kill its trainers, and a third one kills everything.
    """
    signals: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not signals or now - signals[-1] > _SEPARATE_SECONDS:
            signals.append(now)

    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means to outlive the terminal
        ending.append(signal.SIGHUP)
    for number in ending:
        signal.signal(number, stop)
    parts = {"service": start("serve"), "worker": start("worker")}
    ended: dict[str, int] = {}
    try:
        while not signals and not ended:
            time.sleep(0.2)
            ended = {name: part.returncode for name, part in parts.items() if part.poll() is not None}
    finally:
        requested = min(len(signals), 1)
        end(
            {parts["service"]: _END_SECONDS, parts["worker"]: _WORKER_SECONDS},
            further_signals=lambda: len(signals) - requested,
        )
    for name, status in ended.items():
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        print(f"accrue: the {name} ended unexpectedly ({how}), so everything was stopped", file=sys.stderr)
    return 1 if ended and not requested else 0
