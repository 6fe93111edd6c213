"""A proxy in front of PostgreSQL, which can cut connections around a commit."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Literal

Cut = Literal["before", "after"]

_DONE_SECONDS = 0.1
"""Seconds within which the server completes a commit that it has received."""


class Proxy:
    """Listens on a free port of loopback, and passes bytes to the server's socket.

    If `cut` is set, every n-th commit loses its connection: either before it reaches the server, or after the
    server has committed and before the client receives the response.
    """

    def __init__(self, folder: Path) -> None:
        self._server = str(folder / ".s.PGSQL.5432")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cut: Cut | None = None
        self.every = 5
        self.cuts = 0
        self._commits = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            mute = threading.Event()
            threading.Thread(target=self._to_server, args=(client, server, mute), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client, mute), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, mute: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(65536):
                cut = self._to_cut(content)
                if cut == "before":
                    break
                if cut == "after":
                    mute.set()
                server.sendall(content)
                if cut == "after":
                    time.sleep(_DONE_SECONDS)
                    break
        _end(client, server)

    def _to_client(self, server: socket.socket, client: socket.socket, mute: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := server.recv(65536):
                if not mute.is_set():
                    client.sendall(content)
        _end(client, server)

    def _to_cut(self, content: bytes) -> Cut | None:
        if self.cut is None or b"COMMIT" not in content:
            return None
        with self._lock:
            self._commits += 1
            if self._commits % self.every:
                return None
            self.cuts += 1
            return self.cut


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
