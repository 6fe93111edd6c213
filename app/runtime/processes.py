"""Service and worker as processes of their own, started and ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import IO

from app import PACKAGE_PREFIX
from app.errors import BadSetting
from app.runtime import parent

_LIFELINES: dict[int, int] = {}
"""By the id of each process started here, the write end of the pipe that it watches. The pipe closes when
this process ends."""

_END_SECONDS = 45.0
"""Longer than a trainer's grace for its checkpoint."""


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


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Sends SIGTERM to each process, and SIGKILL to those that still run after a while."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if (lifeline := _LIFELINES.pop(process.pid, None)) is not None:
            os.close(lifeline)


def up() -> int:
    """Runs the service and the worker until a signal arrives or one of them ends. Returns the exit status."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means to outlive the terminal
        ending.append(signal.SIGHUP)
    for number in ending:
        signal.signal(number, stop)
    parts = {"service": start("serve"), "worker": start("worker")}
    ended: dict[str, int] = {}
    try:
        while not stopped and not ended:
            time.sleep(0.2)
            ended = {name: part.returncode for name, part in parts.items() if part.poll() is not None}
    finally:
        end(list(parts.values()))
    for name, status in ended.items():
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        print(f"accrue: the {name} ended unexpectedly ({how}), so everything was stopped", file=sys.stderr)
    return 1 if ended and not stopped else 0
