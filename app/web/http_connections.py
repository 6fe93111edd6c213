"""uvicorn's protocol, which also ends connections whose clients keep it waiting, or send too much at once.

The service waits for a client that sends a request, or that reads a response. A request's head and the
next request on a connection must come, and each 30 KiB of a response must be read, within a time limit. If
there are as many connections as there may be, a new one takes the place of the one that has waited for its
client longest.
"""

import contextlib
import fcntl
import sys
import termios
from asyncio import TimerHandle
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEADER_SECONDS = 15.0
"""Seconds in which a request's headers must arrive, from the connection's start or from their first byte."""

IDLE_SECONDS = 75
"""Seconds for which a connection is kept open for its next request. Clients and proxies close idle
connections themselves, most of them within 60 s. If the service did so first, it could close one at the
moment when a client sends a request, which would then fail, and which is not safe to repeat."""

ENDING = 50
"""Connections that may be closing at any one time, in addition to the open ones."""

_WRITE_BUFFER_BYTES = 2**15
"""What a connection may hold of a response that its client does not read, before it waits."""

READ_SECONDS, READ_BYTES = 30.0, 30 * 2**10
"""A client that keeps a response waiting must read this many bytes in this many seconds."""

MAX_HEAD_BYTES = 2**16
"""The maximum size of a request's head, and of what follows its body."""

MAX_PIPELINED = 16
"""The maximum number of requests that wait on a connection for the answer to an earlier one."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _TooMuch(Exception):
    """Ends the parsing of what the client has sent."""


_waiting: "WeakKeyDictionary[ServerState, dict[LimitedHttpProtocol, None]]" = WeakKeyDictionary()
"""Each server's connections that wait for their clients, longest first."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection, which ends if its client is too slow or sends too much."""

    _deadline: TimerHandle | None = None
    """For the head of a request."""
    _stall: TimerHandle | None = None
    """For the next part of a response to be read."""
    _unread = 0
    """Bytes that the client had not read when they were last counted."""
    _served: Any = None
    """The request that is being answered; newer ones may follow it already."""
    _head: int | None = 0
    """Bytes received of the current head, not counting the read in which it began; None if it is complete."""
    _begins_head = False
    """Whether a head begins in what has just been received."""
    _receives_body = False
    """Whether the body of the newest request is incomplete, even if it has been answered already."""
    _beside_body = 0
    """Bytes received since the last part of a body: trailers and chunk extensions."""
    _is_stalled = False
    """Whether the client keeps a response waiting. It may send the next request meanwhile."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive = IDLE_SECONDS
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        most = self.limit_concurrency
        if most is not None and len(self.connections) >= max(2, most - ENDING):
            longest = next(iter(self._waiting()), None)
            if longest is not None:
                del self._waiting()[longest]
                longest.transport.abort()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        self._begins_head = False
        super().data_received(data)
        if self in self._waiting():
            self._wait()
        if self._receives_body:
            if self._beside_body > MAX_HEAD_BYTES:
                self.transport.abort()
        elif self._head is not None and not self._begins_head:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        self._begins_head = True
        super().on_message_begin()
        self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:  # what comes after a body is not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise _TooMuch
        self._head, self._receives_body = None, True
        self._end(self._deadline)
        self._wait()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receives_body, self._beside_body = False, 0
        self._end_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()
        # A connection that closes only waits for the client to read the rest.
        if self.transport.is_closing():
            self._wait_for_head()
        elif self.cycle.response_complete:
            self._wait_for_head(IDLE_SECONDS)  # unless the next request has begun, and is the newest cycle

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

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
        self._waiting().pop(self, None)
        self._end(self._deadline)
        self._end(self._stall)
        if self._served is not None:  # uvicorn informs only the newest of the pipelined requests
            self._served.disconnected = True
            self._served.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._served = cycle

        async def watched(*call: Any) -> None:
            try:
                await app(*call)
            finally:  # uvicorn closes the connection next, if the response is incomplete
                self.loop.call_soon(self._note_end)

        super()._start_asgi_task(cycle, watched)

    def _note_end(self) -> None:
        """Called when a request was handled, whether its response is complete or not."""
        if self.transport.is_closing():
            self._wait_for_head()

    def _waiting(self) -> "dict[LimitedHttpProtocol, None]":
        return _waiting.setdefault(self.server_state, {})

    def _wait(self) -> None:
        """Notes that the client was last heard of now, and is waited for."""
        self._waiting().pop(self, None)
        self._waiting()[self] = None

    def _end_wait(self) -> None:
        """Stops waiting for the client, unless there is another reason to wait."""
        if self._head is None and not self._receives_body and not self._is_stalled:
            self._waiting().pop(self, None)

    def _wait_for_head(self, seconds: float = HEADER_SECONDS) -> None:
        if self not in self.connections:
            return  # it has ended
        self._head = 0
        self._wait()
        self._end(self._deadline)
        self._deadline = self.loop.call_later(seconds, self._give_up)

    def _end(self, timer: TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        """Closes the connection; if it is closing already, aborts it, since the client does not read the
        rest."""
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
            sent = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            unread += int.from_bytes(sent, sys.byteorder)
        return unread
