"""Waiting for a worker's answer without holding a thread, and for only so many answers at once.

A waiting thread serves no other request, and there are forty: waiting is done on the event loop, which looks
into the database from a thread for a moment now and then.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio import to_thread

from app.errors import TooManyRequests

MOST_OF_A_KEY = 8
"""Requests of one key that wait at once."""
MOST = 64

_FIRST_LOOK, _LONGEST_PAUSE = 0.02, 0.25

Found = TypeVar("Found")
Gone = Callable[[], Awaitable[bool]]
"""Whether the client is gone, as `Request.is_disconnected`."""


class Waits:
    """The number of waiting requests of each key."""

    def __init__(self) -> None:
        self._waiting: Counter[str | None] = Counter()

    def has_place(self, key_id: str | None) -> bool:
        """Whether one more may wait; who need not, is answered at once instead."""
        return self._waiting[key_id] < MOST_OF_A_KEY and self._waiting.total() < MOST

    @contextmanager
    def place(self, key_id: str | None) -> Iterator[None]:
        """One of the places for those who wait, for the time of the block.

        Raises:
            TooManyRequests: they are all taken.
        """
        if not self.has_place(key_id):
            raise TooManyRequests(
                f"{self._waiting[key_id]} requests of this key are already waiting for a worker: try "
                "again once some "
                "have finished.",
                retry_after_seconds=5,
            )
        self._waiting[key_id] += 1
        try:
            yield
        finally:
            self._waiting[key_id] -= 1
            if not self._waiting[key_id]:
                del self._waiting[key_id]


async def never() -> bool:
    """For callers that are no HTTP client."""
    return False


async def until_found(look: Callable[[], Found | None], seconds: float, gone: Gone = never) -> Found | None:
    """What `look` gives as soon as it gives something; null if that is not so in time, or whoever asked has
    gone. It runs in a thread, at growing intervals."""
    deadline, pause = time.monotonic() + seconds, _FIRST_LOOK
    while (found := await to_thread.run_sync(look)) is None:
        left = deadline - time.monotonic()
        if left <= 0 or await gone():
            return None
        await asyncio.sleep(min(pause, left))
        pause = min(_LONGEST_PAUSE, 1.25 * pause)
    return found
