"""How often a key may ask."""

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

from app.errors import TooManyRequests

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.strategies import MovingWindowRateLimiter


class Rates:
    """A limit over a moving window, by key; in memory, or in Redis for several services together."""

    def __init__(self, limit: str, storage: str) -> None:
        """
        Args:
            limit: as in `6000/minute`; empty: none. Both are checked by `Settings`.
            storage: `memory://`, or a Redis URL.
        """
        self._said, self._storage = limit, storage

    @cached_property
    def _limit(self) -> "RateLimitItem":
        from limits import parse

        return parse(self._said)

    @cached_property
    def _limiter(self) -> "MovingWindowRateLimiter":
        from limits.storage import storage_from_string
        from limits.strategies import MovingWindowRateLimiter

        return MovingWindowRateLimiter(storage_from_string(self._storage))

    def count(self, key_id: str) -> None:
        """Counts a request.

        Raises:
            TooManyRequests: it is one too many; it says how long to wait.
        """
        if not self._said or self._limiter.hit(self._limit, key_id):
            return
        again = self._limiter.get_window_stats(self._limit, key_id).reset_time
        seconds = max(1, math.ceil(again - time.time()))
        raise TooManyRequests(
            f"More than {self._limit} with this key: wait {seconds} s.", retry_after_seconds=seconds
        )
