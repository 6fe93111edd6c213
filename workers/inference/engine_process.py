"""Starts an engine's process (`engine_main.py`), and exchanges lines with it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from workers.inference.protocol import AnswerOrder, LoadOrder, Reported
from workers.run_directory import TOKEN_VARIABLE
from workers.trainer_process import WITHOUT_NETWORK, pipe_with

_MOST_BYTES = 64 * 2**20
"""The longest line that an engine may send."""


class EngineProcess:
    """`python -m workers.inference.engine_main`, which imports everything before it gets a model to load."""

    def __init__(self, environment: Mapping[str, str], *, network: bool = True) -> None:
        """
        Args:
            network: whether the process may use the network, to download a model.

        Raises:
            OSError: the process cannot be started.
        """
        self._socket, theirs = socket.socketpair()
        self._unread = b""
        self._unsent = bytearray()
        self.is_open = True
        command = [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.inference.engine_main"]
        token = pipe_with(os.environ.get("HF_TOKEN", ""))
        try:
            self._process = subprocess.Popen(
                command if network else [*WITHOUT_NETWORK, *command],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**environment, "OPENBLAS_NUM_THREADS": "1", TOKEN_VARIABLE: str(token)},
                pass_fds=[token],
                start_new_session=True,
                cwd=PACKAGES_FOLDER,
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
            os.close(token)
        self._socket.setblocking(False)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, order: LoadOrder | AnswerOrder) -> None:
        """Sends an order, as far as the engine receives it now; the rest with `send_rest`."""
        self._unsent += order.model_dump_json().encode() + b"\n"
        self.send_rest()

    def send_rest(self) -> None:
        while self._unsent and self.is_open:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False

    def received(self) -> Iterator[Reported]:
        """What the engine has sent since the last call. A process that sends something else is killed."""
        while self.is_open:
            try:
                received = self._socket.recv(2**20)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self.is_open = False
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            if len(self._unread) > _MOST_BYTES:
                self.kill()
                return
            for line in lines:
                try:
                    yield Reported.model_validate_json(line)
                except ValidationError:
                    self.kill()
                    return

    def kill(self) -> None:
        """Ends the engine, and the processes that it has started."""
        self.is_open = False
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
