"""Service and worker as processes of their own, started and ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

from app import PACKAGE_PREFIX
from app.errors import BadSetting
from app.runtime import parent

_LIFELINES: dict[int, int] = {}
"""By the id of each process started here, the write end of the pipe that it watches. The pipe closes when
this process ends."""

_END_SECONDS = 45.0
"""Longer than a small trainer's grace for its checkpoint."""

_LONGEST_END_SECONDS = 3600.0
"""How long `accrue up` waits for a worker, which ends trainers of any size in time unless it hangs."""

_NOTICE_SECONDS = 5.0
"""After this time, `accrue up` says what it waits for."""


def check_port(host: str, port: int) -> None:
    """Checks that the service can listen on a port.

    Raises:
        BadSetting: another process listens on that port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
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
    processes: Sequence[subprocess.Popen[bytes]],
    *,
    seconds: float = _END_SECONDS,
    is_hurried: Callable[[], bool] = lambda: False,
) -> None:
    """Sends SIGTERM to each process, and SIGKILL to those that still run after a while.

    Args:
        seconds: how long they may take.
        is_hurried: once it returns true, each process gets a second SIGTERM, which makes a worker kill its
            trainers.
    """
    began, hurried, noticed = time.monotonic(), False, False
    _terminate(processes)
    while any(process.poll() is None for process in processes):
        elapsed = time.monotonic() - began
        if elapsed > seconds:
            for process in processes:
                process.kill()
        elif is_hurried() and not hurried:
            hurried = True
            _terminate(processes)
        elif elapsed > _NOTICE_SECONDS and not noticed and seconds > _END_SECONDS:
            noticed = True
            print("accrue: trainers are writing their checkpoints; Ctrl-C again ends them at once, and their "
                  "jobs continue from earlier checkpoints", file=sys.stderr)  # fmt: skip
        time.sleep(0.05)
    for process in processes:
        if (lifeline := _LIFELINES.pop(process.pid, None)) is not None:
            os.close(lifeline)


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


def up() -> int:
    """Runs the service and the worker until a signal arrives or one of them ends. Returns the exit status.

    While they end, another signal makes the worker kill its trainers.
    """
    signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1

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
        before = signals
        end([parts["service"]])
        end([parts["worker"]], seconds=_LONGEST_END_SECONDS, is_hurried=lambda: signals > before)
    for name, status in ended.items():
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        print(f"accrue: the {name} ended unexpectedly ({how}), so everything was stopped", file=sys.stderr)
    return 1 if ended and not before else 0
