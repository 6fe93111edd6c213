"""A server that sends one byte at a time: each byte renews a read timeout, and the answer takes minutes."""

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def slow_server() -> Iterator[str]:
    """Runs the server for one connection, and yields its address (http://127.0.0.1:port)."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for byte in b"HTTP/1.1 200 OK\r\nx-slow: " + b"x" * 1000:
                    connection.send(bytes([byte]))
                    if ended.wait(0.1):
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        ended.set()
        thread.join()
