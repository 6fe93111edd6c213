"""A network link that can be cut: passes connections from a free port of loopback to a server."""

import contextlib
import socket
import threading
from pathlib import Path


class Link:
    """Passes connections until `cut()`; then existing ones hang, as they do when a machine loses its network,
    and new ones are accepted and hang too.

    Args:
        server: a port of loopback, or the path of a socket.
    """

    def __init__(self, server: int | Path) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Passes nothing from now on."""
        self._is_cut.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        held = []  # keeps connections open that lead nowhere
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut.is_set():
                held.append(client)
                continue
            try:
                server = self._connected()
            except OSError:
                client.close()
                continue
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _connected(self) -> socket.socket:
        if isinstance(self._server, int):
            return socket.create_connection(("127.0.0.1", self._server))
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._server))
        return server

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                if self._is_cut.is_set():
                    threading.Event().wait()  # neither passed nor closed
                target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
