"""A process that has loaded the trainers' libraries, and starts trainers as copies of itself.

    worker
      └─ fork server      loads torch and transformers once, then waits for requests
           └─ trainer     a copy, with its own environment, session and descriptors

For each trainer, the worker and the server share a socket. On it, the server reports the process id, then the
exit status. Until the worker closes its end, the server leaves the process in the process table, so that no
other process gets its id; if the worker closes it earlier, the server kills the trainer.

The server has only the environment that all trainers share, without the worker's secrets.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.contract import fail_points
from workers.run_directory import (
    GPU_NAMES_VARIABLE,
    HIDDEN_VARIABLE,
    LIFELINE_VARIABLE,
    SILENCE_VARIABLE,
    TOKEN_VARIABLE,
)
from workers.training.processes.lifeline import die_with_parent
from workers.training.processes.preloading import STOP_SIGNALS, become_trainer, command, forking, preload

_OWN_VARIABLES = {
    LIFELINE_VARIABLE, SILENCE_VARIABLE, TOKEN_VARIABLE, HIDDEN_VARIABLE, GPU_NAMES_VARIABLE,
    "CUDA_VISIBLE_DEVICES", fail_points.VARIABLE,
}  # fmt: skip
"""Variables of a single trainer. Libraries read the others when they are loaded."""

_MESSAGE_BYTES, _MOST_DESCRIPTORS = 2**17, 64
_REACTS_WITHIN_SECONDS = 30.0
"""If a server does not react for this long, it hangs: while it loads libraries from a disk that is gone, for
example."""
_ROOM_FOR_COMMAND = 1024
"""Bytes of the server's command line that its copies can replace by their own."""


class ForkedTrainer:
    """A trainer that a fork server started: what `subprocess.Popen` is for one that the worker started."""

    def __init__(self, connection: socket.socket, end_server: Callable[[], None]) -> None:
        """
        Args:
            end_server: kills the server, with everything that it has started.
        """
        connection.setblocking(False)
        self._connection, self._end_server = connection, end_server
        self._cancelled_at: float | None = None
        self._process: int | None = None
        """Refers to the process, even if another one gets its id (pidfd)."""
        self._signals: list[int] = []
        """To be sent once the process id is known."""
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int | None:
        """None until the server has loaded its libraries."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None while the trainer is alive, or was not started
        yet.

        If it was killed before its start, and the server, which holds its descriptors, does not react, the
        server is killed.
        """
        if self._cancelled_at is not None and time.monotonic() > self._cancelled_at + _REACTS_WITHIN_SECONDS:
            self._end_server()
        while self.returncode is None:
            try:
                message = self._connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                message = b""
            if not message:  # the server has ended, and the trainer with it; or it was never started
                if self._process is None or _has_ended(self._process):
                    self._end(-signal.SIGKILL)
                break
            content = json.loads(message)
            if "status" in content:
                self._end(content["status"])
            else:
                self._note_start(content["pid"])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the trainer has not ended after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
            select.select([self._connection], [], [], 0.05 if left is None else min(left, 0.05))
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal; to a trainer that was not started yet, once it is started. SIGKILL prevents the
        start."""
        if self.poll() is not None:
            return
        if self._pid is not None:
            self._signal(number)
        elif number == signal.SIGKILL:
            self._cancelled_at = self._cancelled_at or time.monotonic()
            self._connection.shutdown(socket.SHUT_WR)
        else:
            self._signals.append(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _note_start(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            self._process = os.pidfd_open(pid)
        for number in self._signals:
            self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended with its server
            if self._process is not None:
                signal.pidfd_send_signal(self._process, number)
            elif self._pid is not None:
                os.kill(self._pid, number)

    def _end(self, status: int) -> None:
        self.returncode = status
        self._connection.close()
        if self._process is not None:
            os.close(self._process)


class ForkServer:
    """The worker's side of a fork server, which is started with the first trainer and again if it has ended.

    The server ends with the thread that starts the first trainer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._environment: dict[str, str] = {}
        """What the trainers' environments have in common."""

    def start(
        self,
        run: Path,
        environment: Mapping[str, str],
        output: int,
        named: Mapping[str, int],
        others: Sequence[int] = (),
    ) -> ForkedTrainer | None:
        """Starts a trainer.

        Args:
            output: the descriptor of the file to which it prints.
            named: descriptors that it gets, by the environment variable that tells it their numbers.
            others: descriptors that it keeps open as long as it lives.

        Returns:
            None if the trainer must be started in another way: this system has no pidfds (other than Linux),
            its environment differs from the other trainers', or the request is too large.
        """
        if not _is_possible():
            return None
        common = {name: value for name, value in environment.items() if name not in _OWN_VARIABLES}
        request = {"run": str(run), "environment": dict(environment), "named": list(named)}
        message = json.dumps(request).encode()
        if len(message) > _MESSAGE_BYTES or 2 + len(named) + len(others) > _MOST_DESCRIPTORS:
            return None
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                self._start_server(common)
            if common != self._environment or self._requests is None or self._server is None:
                return None
            end_server = self._server.kill
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                descriptors = [theirs.fileno(), output, *named.values(), *others]
                try:
                    socket.send_fds(self._requests, [message], descriptors)
                except OSError:  # it has just ended, or is still loading with many requests waiting
                    ours.close()
                    return None
        return ForkedTrainer(ours, end_server)

    def close(self) -> None:
        """Ends the server, and trainers that still run."""
        with self._lock:
            if self._requests is not None:
                self._requests.close()
            if self._server is not None:
                self._server.kill()  # it may be loading libraries, and has nothing to lose
                self._server.wait()
            self._server = self._requests = None

    def _start_server(self, environment: dict[str, str]) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        module = f"{PACKAGE_PREFIX}workers.training.processes.fork_server"
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), " " * _ROOM_FOR_COMMAND],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if sys.stderr is None else None,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=PACKAGES_FOLDER,
            )
        self._environment = environment


@dataclass
class _Child:
    """A trainer, as the server knows it."""

    pid: int
    process: int
    """Readable once the process has ended (pidfd)."""
    connection: socket.socket
    has_ended: bool = False
    is_closed: bool = False
    """Whether the worker has closed its end of the connection."""

    def close(self) -> None:
        self.connection.close()
        os.close(self.process)


class _Server:
    """The server's side. It has a single thread, since a copy of a process has no other threads."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: list[_Child] = []
        self._pid = os.getpid()

    def run(self) -> None:
        """Answers requests until the worker closes its end."""
        while True:
            watched: list[Any] = [self._requests]
            watched += [each.connection for each in self._children if not each.is_closed]
            watched += [each.process for each in self._children if not each.has_ended]
            ready = set(select.select(watched, [], [])[0])
            for child in list(self._children):
                self._handle(child, ready)
            if self._requests in ready and not self._answer():
                return

    def _handle(self, child: _Child, ready: set[Any]) -> None:
        """Reports the end of a trainer, or kills it if the worker has closed its end."""
        if child.process in ready:
            child.has_ended = True
            with contextlib.suppress(OSError):
                _send(child.connection, status=_status_of(child.pid))
        if child.connection in ready:  # the worker sends nothing on it
            child.is_closed = True
            if not child.has_ended:
                os.kill(child.pid, signal.SIGKILL)
        if child.has_ended and child.is_closed:
            os.waitpid(child.pid, 0)
            child.close()
            self._children.remove(child)

    def _answer(self) -> bool:
        """Starts the trainer that is requested next. Returns whether there was a request."""
        message, descriptors, flags, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            return False
        if flags & socket.MSG_CTRUNC:  # this process may open no more files
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        connection, output, *others = descriptors
        try:
            self._start(json.loads(message), socket.socket(fileno=connection), output, others)
        except Exception:  # one request must not end the trainers of others
            _print_error(output)
        finally:
            for descriptor in (output, *others):
                os.close(descriptor)
        return True

    def _start(
        self, request: dict[str, Any], connection: socket.socket, output: int, others: list[int]
    ) -> None:
        """Starts a trainer, or reports that it cannot be started."""
        if select.select([connection], [], [], 0)[0]:  # the worker has cancelled the request
            connection.close()
            return
        pid = 0
        try:
            with forking():
                pid = os.fork()
                if pid == 0:
                    self._become(request, connection, output, others)
            self._children.append(_Child(pid, os.pidfd_open(pid), connection))
        except OSError:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            _print_error(output)
            with connection:
                _send(connection, status=1)
        else:
            _send(connection, pid=pid)

    def _become(
        self, request: dict[str, Any], connection: socket.socket, output: int, others: list[int]
    ) -> NoReturn:
        """Turns this copy of the server into the trainer."""
        try:
            die_with_parent()
            if os.getppid() != self._pid:  # the server has ended before
                os._exit(1)
            os.setsid()
            self._requests.close()
            connection.close()
            for sibling in self._children:
                sibling.close()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            for descriptor in others:
                os.set_inheritable(descriptor, True)
            numbers = {name: str(number) for name, number in zip(request["named"], others, strict=False)}
            run = Path(request["run"])
            _show_command(command(run))
            become_trainer(run, request["environment"] | numbers)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _print_error(output: int) -> None:
    """Prints the error that is being handled to a trainer's log, unless the disk is full."""
    with contextlib.suppress(OSError):
        os.write(output, traceback.format_exc().encode())


def _send(connection: socket.socket, **content: int) -> None:
    connection.send(json.dumps(content).encode())


def _status_of(pid: int) -> int:
    """The exit status of a child that has ended, negative after a signal. The child stays in the process
    table."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _has_ended(process: int) -> bool:
    """Whether the process of a pidfd has ended."""
    return bool(select.select([process], [], [], 0)[0])


def _is_possible() -> bool:
    """Whether this system has pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _show_command(words: list[str]) -> None:
    """Replaces this process's command line, as `ps` shows it, if there is room for the new one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc_pid_stat(5)
    content = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(content) <= end - start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


if __name__ == "__main__":
    die_with_parent()
    for stop in STOP_SIGNALS:  # which all processes of a service get: this one must outlive its trainers
        signal.signal(stop, signal.SIG_IGN)
    try:
        preload()
    except Exception:
        traceback.print_exc()  # each trainer fails in the same way, and says why
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()
