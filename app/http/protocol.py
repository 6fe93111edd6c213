"""Connections: so many at once, and only for those who say in time what they want."""

import resource
from asyncio import TimerHandle
from typing import Any

HEADER_SECONDS = 15.0
"""In which a request's head must have arrived, from the connection's start or from its own first byte."""

MOST_CONNECTIONS = 4000
_OTHER_FILES = 256
"""Open files that are not connections: the database, uploads, logs."""


def connections_for() -> int:
    """Connections at once, beyond which the answer is 503; as many open files are made possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(64, min(soft, wanted) - _OTHER_FILES)


def protocol() -> Any:
    """uvicorn's own protocol, but for connections that stay silent, or send a request's head for ever."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Impatient(HttpToolsProtocol):
        _silent: TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
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

    return Impatient
