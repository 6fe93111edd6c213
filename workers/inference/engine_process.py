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

_MOST_ANSWER_BYTES = 2**28
"""The most that an engine may send for one request; 131,072 tokens with 20 log probabilities each need
less."""

_BYTES_AT_ONCE = 2**18
"""How much is taken from an engine before the next one's turn, so that none can keep the others waiting."""


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
        self._answered: dict[str, int] = {}
        """The bytes received so far for each open request."""
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
        if isinstance(order, AnswerOrder):
            if order.order is None:
                self._answered.pop(order.id, None)
            else:
                self._answered[order.id] = 0
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
        """What the engine has sent since the last call, or a part of it if that is much. A process that sends
        something else, or too much for one request, is killed."""
        taken = 0
        while self.is_open and taken < _BYTES_AT_ONCE:
            try:
                received = self._socket.recv(_BYTES_AT_ONCE)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self.is_open = False
                return
            taken += len(received)
            *lines, self._unread = (self._unread + received).split(b"\n")
            if len(self._unread) > _MOST_BYTES:
                self.kill()
                return
            for line in lines:
                try:
                    reported = Reported.model_validate_json(line)
                except ValidationError:
                    self.kill()
                    return
                if self._is_too_much(reported, len(line)):
                    self.kill()
                    return
                yield reported

    def _is_too_much(self, reported: Reported, size: int) -> bool:
        """Counts what the engine sends for an open request; what it sends for others is ignored."""
        if reported.id not in self._answered:
            return False
        total = self._answered.pop(reported.id) + size
        if reported.part is not None and not reported.part.is_last:
            self._answered[reported.id] = total
        return total > _MOST_ANSWER_BYTES

    def kill(self) -> None:
        """Ends the engine, and the processes that it has started."""
        self.is_open = False
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
