"""Waits for a worker's answer without holding a thread, and limits the number of waiting requests.

A waiting thread cannot serve another request, and there are only forty threads. So requests wait on the event
loop, which uses a thread only to poll the database.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio import to_thread

from app.errors import TooManyRequests

MAX_PER_KEY = 8
"""The maximum number of requests of one key that wait at the same time."""
MAX_TOTAL = 64

_FIRST_INTERVAL, _MAX_INTERVAL = 0.02, 0.25

Found = TypeVar("Found")
Gone = Callable[[], Awaitable[bool]]
"""Whether the client is gone, as `Request.is_disconnected`."""


class WaitLimiter:
    """The number of waiting requests of each key."""

    def __init__(self) -> None:
        self._waiting: Counter[str | None] = Counter()

    def has_place(self, key_id: str | None) -> bool:
        """Whether one more request may wait. If not, callers that need not wait should answer at once."""
        return self._waiting[key_id] < MAX_PER_KEY and self._waiting.total() < MAX_TOTAL

    @contextmanager
    def place(self, key_id: str | None) -> Iterator[None]:
        """Counts a waiting request for the duration of the block.

        Raises:
            TooManyRequests: too many requests are waiting already.
        """
        if not self.has_place(key_id):
            own = self._waiting[key_id] >= MAX_PER_KEY
            waiting = f"{MAX_PER_KEY} requests of this key" if own else f"{MAX_TOTAL} requests of all keys"
            raise TooManyRequests(
                f"{waiting} are already waiting for a worker: try again once some have finished.",
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
    """For callers without an HTTP client."""
    return False


async def until_found(
    look: Callable[[], Found | None], seconds: float, is_disconnected: Gone = never
) -> Found | None:
    """Polls `look` in a thread, at growing intervals, until it returns a result.

    Returns None on a timeout, or if the client has disconnected.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_INTERVAL
    while (found := await to_thread.run_sync(look)) is None:
        left = deadline - time.monotonic()
        if left <= 0 or await is_disconnected():
            return None
        await asyncio.sleep(min(pause, left))
        pause = min(_MAX_INTERVAL, 1.25 * pause)
    return found
