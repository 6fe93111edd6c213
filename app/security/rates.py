"""How often a key may ask."""

import math
import time

from limits import RateLimitItem, parse
from limits.storage import storage_from_string
from limits.strategies import MovingWindowRateLimiter

from app.errors import BadSetting, TooManyRequests


class Rates:
    """A limit over a moving window, by key; in memory, or in Redis for several services together."""

    def __init__(self, limit: str, storage: str) -> None:
        """
        Args:
            limit: as in `6000/minute`; empty: none.
            storage: `memory://`, or a Redis URL.

        Raises:
            BadSetting: one of them is not understood.
        """
        self._limit = _parsed(limit) if limit else None
        try:
            self._limiter = MovingWindowRateLimiter(storage_from_string(storage))
        except Exception as error:
            raise BadSetting(f"ACCRUE_RATE_LIMIT_STORAGE: {error}") from None

    def count(self, key_id: str) -> None:
        """Counts a request.

        Raises:
            TooManyRequests: it is one too many; it says how long to wait.
        """
        if self._limit is None or self._limiter.hit(self._limit, key_id):
            return
        again = self._limiter.get_window_stats(self._limit, key_id).reset_time
        seconds = max(1, math.ceil(again - time.time()))
        raise TooManyRequests(
            f"More than {self._limit} with this key: wait {seconds} s.", retry_after_seconds=seconds
        )


def _parsed(limit: str) -> RateLimitItem:
    try:
        return parse(limit)
    except ValueError:
        raise BadSetting(
            f"ACCRUE_RATE_LIMIT: {limit} is no limit, such as 6000/minute or 50/second"
        ) from None
