"""A server's connections without sockets, whose timers are fired by hand."""

import asyncio
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from app.web.http_connections import LimitedHttpProtocol

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@dataclass
class Timer:
    seconds: float
    call: Any
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Task:
    def add_done_callback(self, call: Any) -> None:
        """It is never done."""


class Clock:
    """An event loop whose timers are fired by hand, and whose tasks never run."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Any) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    def fire(self) -> None:
        """Fires all timers that are set now."""
        due, self.timers = self.timers, []
        for timer in due:
            if not timer.cancelled:
                timer.call()

    def create_task(self, coroutine: Any, **_: Any) -> Task:
        coroutine.close()
        return Task()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.unread, self.closed, self.aborted, self.is_reading = 0, False, False, True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.unread += len(data)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Connections:
    """A server's connections, without a socket."""

    def __init__(self, most: int | None = None) -> None:
        self.clock = Clock()
        self.config = uvicorn.Config(self.app, log_config=None, limit_concurrency=most)
        self.config.load()
        self.state = ServerState()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Never runs."""

    def open(self) -> tuple[Any, Transport]:
        made, transport = LimitedHttpProtocol(self.config, self.state, {}, self.clock), Transport()
        made.connection_made(transport)
        return made, transport

    def answer(self, connection: Any) -> None:
        """Ends the response to the newest request."""
        connection.cycle.response_complete = True
        connection.on_response_complete()
