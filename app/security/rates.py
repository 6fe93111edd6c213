"""How often a key may ask."""

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

from app.errors import BadSetting, TooManyRequests

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.strategies import MovingWindowRateLimiter


class Rates:
    """A limit over a moving window, by key; in memory, or in Redis for several services together."""

    def __init__(self, limit: str, storage: str) -> None:
        """
        Args:
            limit: as in `6000/minute`; empty: none.
            storage: `memory://`, or a Redis URL.
        """
        self._said, self._storage = limit, storage

    def check(self) -> None:
        """Raises:
        BadSetting: the limit, or its storage, is not understood.
        """
        if self._said:
            assert self._limit
            assert self._limiter

    @cached_property
    def _limit(self) -> "RateLimitItem":
        from limits import parse

        try:
            return parse(self._said)
        except ValueError:
            message = f"ACCRUE_RATE_LIMIT: {self._said} is no limit, such as 6000/minute or 50/second"
            raise BadSetting(message) from None

    @cached_property
    def _limiter(self) -> "MovingWindowRateLimiter":
        from limits.storage import storage_from_string
        from limits.strategies import MovingWindowRateLimiter

        try:
            return MovingWindowRateLimiter(storage_from_string(self._storage))
        except Exception as error:
            raise BadSetting(f"ACCRUE_RATE_LIMIT_STORAGE: {error}") from None

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
