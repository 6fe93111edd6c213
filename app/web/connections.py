"""Limits on connections: their number, the time and size of a request's headers, and slow readers."""

import contextlib
import fcntl
import resource
import sys
import termios
from asyncio import TimerHandle
from typing import Any

from app.web.downloads import MAX_OPEN_FILES
from app.web.middleware import MAX_UPLOADS

HEADER_SECONDS = 15.0
"""Seconds in which a request's headers must arrive, from the connection's start or from their first byte."""

_ENDING = 50
"""Connections that may be ending at any time, beside those that are kept."""

_WRITE_BUFFER_BYTES = 2**15
"""What a connection may hold of a response that its client does not read, before it waits."""

READ_SECONDS, READ_BYTES = 30.0, 30 * 2**10
"""A client that keeps a response waiting must read this many bytes in this many seconds."""

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
    """uvicorn's protocol, which also ends connections whose clients keep it waiting.

    The service waits for a client that sends a request, or that reads a response. A request's head, the next
    request on a connection, and each 30 KiB of a response must come within a time limit. If there are as many
    connections as there may be, a new one takes the place of the one that has waited for its client longest.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    waiting: dict[HttpToolsProtocol, None] = {}
    """The connections that wait for their clients, longest first."""

    class SupervisedProtocol(HttpToolsProtocol):
        _deadline: TimerHandle | None = None
        """For the head of a request."""
        _stall: TimerHandle | None = None
        """For the next part of a response to be read."""
        _unread = 0
        """Bytes that the client had not read when they were last counted."""
        _served: Any = None
        """The request that is being answered; newer ones may follow it already."""
        _head: int | None = 0
        """Bytes received of the current head, or None if it is complete."""
        _receives_body = False
        _is_stalled = False
        """Whether the client keeps a response waiting. It may send the next request meanwhile."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
            most = self.limit_concurrency
            if most is not None and len(self.connections) >= max(2, most - _ENDING):
                longest = next(iter(waiting), None)
                if longest is not None:
                    del waiting[longest]
                    longest.transport.abort()
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self in waiting:
                self._wait()
            if self._head is not None:
                self._head += len(data)
                if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_head()

        def on_headers_complete(self) -> None:
            self._head, self._receives_body = None, True
            self._end(self._deadline)
            self._wait()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._receives_body = False
            self._end_wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise the next request has begun
                self._wait_for_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._is_stalled = True
            self._wait()
            self._unread = self._bytes_unread()
            self._end(self._stall)
            self._stall = self.loop.call_later(READ_SECONDS, self._check_reader)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._is_stalled = False
            self._end_wait()
            self._end(self._stall)

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._end(self._deadline)
            self._end(self._stall)
            if self._served is not None:  # uvicorn tells only the newest of pipelined requests
                self._served.disconnected = True
                self._served.message_event.set()
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._served = cycle
            super()._start_asgi_task(cycle, app)

        def _wait(self) -> None:
            """Notes that the client was last heard of now, and is waited for."""
            waiting.pop(self, None)
            waiting[self] = None

        def _end_wait(self) -> None:
            """Notes that the client is not waited for any more, unless it is for another reason."""
            if self._head is None and not self._receives_body and not self._is_stalled:
                waiting.pop(self, None)

        def _wait_for_head(self) -> None:
            self._head = 0
            self._wait()
            self._end(self._deadline)
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

        def _end(self, timer: TimerHandle | None) -> None:
            if timer is not None:
                timer.cancel()

        def _give_up(self) -> None:
            """Closes the connection; ends it at once if it was closed, and the client does not read what is
            left."""
            if self.transport.is_closing():
                self.transport.abort()
                return
            self.transport.close()
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def _check_reader(self) -> None:
            unread = self._bytes_unread()
            if self._unread - unread < READ_BYTES:
                self.transport.abort()
                return
            self._wait()
            self._unread = unread
            self._stall = self.loop.call_later(READ_SECONDS, self._check_reader)

        def _bytes_unread(self) -> int:
            """What the client has not received yet: in this process, and in the kernel where it says so."""
            unread: int = self.transport.get_write_buffer_size()
            with contextlib.suppress(OSError, AttributeError):
                # What the other side has not acknowledged yet: tcp(7), where this is called SIOCOUTQ.
                sent = fcntl.ioctl(
                    self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)
                )
                unread += int.from_bytes(sent, sys.byteorder)
            return unread

    return SupervisedProtocol
