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
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Passes nothing from now on."""
        self._is_cut.set()

    def restore(self) -> None:
        """Passes new connections; those of before are reset, as their ends notice at last."""
        self._is_cut.clear()
        for held in self._held:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        self._held = []

    def close(self) -> None:
        """Ends all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the thread would accept one more
        self._listener.close()
        self.restore()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(client)
            if self._is_cut.is_set():
                continue
            try:
                server = self._connected()
            except OSError:
                client.close()
                continue
            self._held.append(server)
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
                    return  # neither passed nor closed
                target.sendall(content)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
