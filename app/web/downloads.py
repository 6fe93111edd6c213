"""Streaming responses, and limits on the files that they hold open."""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import TooManyRequests

MAX_PER_KEY = 20
"""The maximum number of concurrent streams of one key: a slow reader keeps the stream's files open."""
MAX_STREAMS = 200
MAX_OPEN_FILES = 1000
"""The maximum number of files that all streams together hold open."""


class ClosingStream(StreamingResponse):
    """A stream whose files are closed at its end, even if the client disconnected or never read any of it.

    Args:
        parts: texts or bytes; they are generated in a thread, one after another.
        close: releases the resources behind the parts.
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
                with suppress(ValueError):  # a thread is running the generator, and finishes it
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
        """Opens a stream.

        Args:
            files: the number of files that the stream holds open.

        Raises:
            TooManyRequests: the maximum number of streams or files is open.
        """
        with self._counting:
            if self._open[key_id] >= MAX_PER_KEY or self._open.total() >= MAX_STREAMS:
                close()
                own = self._open[key_id]
                of = "this key" if own >= MAX_PER_KEY else "all keys"
                message = (
                    f"{own if own >= MAX_PER_KEY else MAX_STREAMS} downloads of {of} are in progress: "
                    "try again "
                )
                raise TooManyRequests(message + "once some have ended.", retry_after_seconds=5)
            if self._files + files > MAX_OPEN_FILES:
                close()
                raise TooManyRequests(
                    "The downloads in progress hold too many files open: try again once some have ended.",
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
