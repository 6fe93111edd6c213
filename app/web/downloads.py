"""Answers that are sent while they are made, and what they hold meanwhile."""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import TooManyRequests

MOST_OF_A_KEY = 20
"""Streams of one key at once: each that is read slowly holds what it is made from."""
MOST = 200
MOST_FILES = 1000
"""Files that are open for all streams together."""


class ClosingStream(StreamingResponse):
    """A stream whose files are closed at its end, also where the client has gone or never read any of it.

    Args:
        parts: texts or bytes, made in a thread one after another.
        close: lets go of what they are made from.
    """

    def __init__(
        self, parts: Iterator[str] | Iterator[bytes], close: Callable[[], None], **options: Any
    ) -> None:
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


class Streams:
    """The streams that are being sent, by key."""

    def __init__(self) -> None:
        self._open: Counter[str | None] = Counter()
        self._files = 0
        self._counting = threading.Lock()

    def open(
        self,
        key_id: str | None,
        parts: Iterator[str] | Iterator[bytes],
        close: Callable[[], None] = lambda: None,
        files: int = 1,
        **options: Any,
    ) -> ClosingStream:
        """One more.

        Args:
            files: how many files it holds open.

        Raises:
            TooManyRequests: as many are being sent as may be.
        """
        with self._counting:
            if self._open[key_id] >= MOST_OF_A_KEY or self._open.total() >= MOST:
                close()
                own = self._open[key_id]
                of = "this key" if own >= MOST_OF_A_KEY else "all keys"
                message = (
                    f"{own if own >= MOST_OF_A_KEY else MOST} downloads of {of} are under way: try again "
                )
                raise TooManyRequests(message + "once some have ended.", retry_after_seconds=5)
            if self._files + files > MOST_FILES:
                close()
                raise TooManyRequests(
                    "The downloads under way hold too many files open: try again once some have ended.",
                    retry_after_seconds=5,
                )
            self._open[key_id] += 1
            self._files += files

        def ended() -> None:
            close()
            with self._counting:
                self._files -= files
                self._open[key_id] -= 1
                if not self._open[key_id]:
                    del self._open[key_id]

        return ClosingStream(parts, ended, **options)
