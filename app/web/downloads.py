"""Downloads: files and streams, with limits on the descriptors that they hold open."""

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from fastapi.responses import FileResponse
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import TooManyRequests
from app.web.concurrency import ConcurrencyLimit

MAX_PER_KEY = 20
"""The maximum number of concurrent downloads of one key: a slow reader keeps the files open."""
MAX_DOWNLOADS = 200
MAX_OPEN_FILES = 1000
"""The maximum number of files that all downloads together hold open."""


class ClosingStream(StreamingResponse):
    """A stream whose files are closed at its end, even if the client disconnected or never read any of it.

    Args:
        parts: texts or bytes, one after another; those of a plain iterator are generated in a thread.
        close: releases the resources behind the parts.
    """

    def __init__(
        self,
        parts: Iterator[str] | Iterator[bytes] | AsyncIterator[str] | AsyncIterator[bytes],
        close: Callable[[], None],
        **options: Any,
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


class ClosingFile(FileResponse):
    """An open file that is counted as a download until it is sent, even if it is deleted meanwhile.

    Args:
        close: ends the counting.
    """

    def __init__(self, file: BinaryIO, close: Callable[[], None], **options: Any) -> None:
        super().__init__(f"/dev/fd/{file.fileno()}", **options)  # which opens the same file again
        self._file, self._close = file, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()
            self._close()


class Downloads:
    """The downloads in progress."""

    def __init__(self) -> None:
        self._limit = ConcurrencyLimit("downloads", per_key=MAX_PER_KEY, total=MAX_DOWNLOADS)
        self._files = 0
        self._counting = threading.Lock()

    def stream(
        self,
        key_id: str | None,
        parts: Iterator[str] | Iterator[bytes] | AsyncIterator[str] | AsyncIterator[bytes],
        close: Callable[[], None] = lambda: None,
        files: int = 1,
        **options: Any,
    ) -> ClosingStream:
        """Responds with a stream.

        Args:
            close: releases what the stream holds; called in any case.
            files: the number of files that the stream holds open.

        Raises:
            TooManyRequests: the maximum number of downloads or files is open.
        """
        try:
            end = self._begin(key_id, files)
        except TooManyRequests:
            close()
            raise

        def ended() -> None:
            close()
            end()

        return ClosingStream(parts, ended, **options)

    def file(self, key_id: str | None, file: BinaryIO, **options: Any) -> ClosingFile:
        """Responds with an open file, or the ranges of it that the client requests. Closes it in any case.

        Raises:
            TooManyRequests: the maximum number of downloads or files is open.
        """
        try:
            return ClosingFile(file, self._begin(key_id, 2), **options)
        except TooManyRequests:
            file.close()
            raise

    def _begin(self, key_id: str | None, files: int) -> Callable[[], None]:
        end = self._limit.acquire(key_id)
        with self._counting:
            fits = self._files + files <= MAX_OPEN_FILES
            self._files += files if fits else 0
        if not fits:
            end()
            raise TooManyRequests(
                "The downloads in progress hold too many files open: try again once some have ended.",
                retry_after_seconds=5,
            )

        def ended() -> None:
            end()
            with self._counting:
                self._files -= files

        return ended
