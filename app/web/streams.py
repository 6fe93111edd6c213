"""Answers that are sent while they are made, and what they hold meanwhile."""

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ClosedStream(StreamingResponse):
    """A stream whose files are closed at its end, also where the client has gone or never read any of it.

    Args:
        parts: made in a thread, one after another.
        close: lets go of what they are made from.
    """

    def __init__(self, parts: Iterator[bytes], close: Callable[[], None], **options: Any) -> None:
        super().__init__(parts, **options)
        self._parts, self._close = parts, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if isinstance(self._parts, Generator):
                with suppress(ValueError):  # a thread is within it at this moment, and reads to its end
                    self._parts.close()
            self._close()
