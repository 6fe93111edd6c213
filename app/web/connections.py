"""Limits on connections: their number, and the time and size of a request's headers."""

import resource
from asyncio import TimerHandle
from typing import Any

from app.web.downloads import MAX_OPEN_FILES
from app.web.middleware import MAX_UPLOADS

HEADER_SECONDS = 15.0
"""Seconds in which a request's headers must arrive, from the connection's start or from their first byte."""

MAX_HEAD_BYTES = 2**16
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

MAX_CONNECTIONS = 4000
_DATABASE_AND_LOGS = 256
_OTHER_FILES = _DATABASE_AND_LOGS + MAX_OPEN_FILES + 2 * MAX_UPLOADS
"""The maximum number of open files besides connections. An upload has two: as received, and as stored."""


def raise_connection_limit() -> int:
    """Raises the limit of open files. Returns the number of connections beyond which the response is 503."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(soft, wanted) - _OTHER_FILES, soft // 2) if soft < wanted else MAX_CONNECTIONS


def protocol() -> Any:
    """uvicorn's protocol, which also closes connections that stay silent or never finish a request's head."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class HeaderTimeoutProtocol(HttpToolsProtocol):
        _silent: TimerHandle | None = None
        _head: int | None = 0
        """Bytes received of the current head, or None if it is complete."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head = 0
            self._wait()

        def on_headers_complete(self) -> None:
            self._head = None
            self._stop_waiting()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._stop_waiting()
            self._silent = self.loop.call_later(HEADER_SECONDS, self._give_up)

        def _stop_waiting(self) -> None:
            if self._silent is not None:
                self._silent.cancel()
                self._silent = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return HeaderTimeoutProtocol
