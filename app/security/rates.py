"""Rate limits per API key."""

import asyncio
import math
import time
from functools import cached_property
from typing import TYPE_CHECKING

import structlog

from app.errors import TooManyRequests

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.aio.strategies import MovingWindowRateLimiter


log = structlog.get_logger("accrue.service")

_STORAGE_SECONDS = 1.0
_WARN_EVERY_SECONDS = 60.0


class RateLimiter:
    """A moving-window rate limit per key, kept in memory, or in Redis if several services share it."""

    def __init__(self, limit: str, storage: str) -> None:
        """
        Args:
            limit: for example `6000/minute`; empty for no limit. `Settings` validates both arguments.
            storage: `memory://`, or a Redis URL.
        """
        self._limit_text, self._storage = limit, storage
        self._warned_at = -math.inf

    @cached_property
    def _limit(self) -> "RateLimitItem":
        from limits import parse

        return parse(self._limit_text)

    @cached_property
    def _seconds(self) -> float | None:
        """How long the storage may take. Memory always answers, unless the event loop itself is busy."""
        return None if self._is_in_memory else _STORAGE_SECONDS

    @property
    def _is_in_memory(self) -> bool:
        return self._storage.startswith("memory:")

    @cached_property
    def _limiter(self) -> "MovingWindowRateLimiter":
        from limits.aio.strategies import MovingWindowRateLimiter
        from limits.storage import storage_from_string

        # The event loop must not wait for Redis: limits' own asynchronous storages.
        own = {} if self._is_in_memory else {"implementation": "redispy"}
        return MovingWindowRateLimiter(storage_from_string(f"async+{self._storage}", **own))

    async def count(self, key_id: str, requests: int = 1) -> None:
        """Counts a request, or one that costs as much as several. If the storage does not answer, the
        request passes uncounted, so that a failing storage does not block everyone.

        Raises:
            TooManyRequests: the key has reached its limit; the error says how long to wait.
        """
        if not self._limit_text:
            return
        try:
            async with asyncio.timeout(self._seconds):
                cost = max(1, min(requests, self._limit.amount // 10))
                if await self._limiter.hit(self._limit, key_id, cost=cost):
                    return
                again = (await self._limiter.get_window_stats(self._limit, key_id)).reset_time
                longest = self._limit.get_expiry()
                seconds = max(1, math.ceil(min(again - time.time(), longest)))  # clocks may differ
        except Exception as error:  # the type depends on the storage's client library
            self._warn(error)
            return
        raise TooManyRequests(
            f"This key has reached its limit of {self._limit}: wait {seconds} s.", retry_after_seconds=seconds
        )

    async def check(self) -> None:
        """Tries a storage in Redis once, and logs an error if it does not work: requests would not be
        counted. Memory always works, and the service starts faster if the first request loads the library."""
        if not self._limit_text or self._is_in_memory:
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._limiter.test(self._limit, "")
        except Exception as error:
            self._warned_at = time.monotonic()
            log.error("requests are not limited: the rate limit's storage fails", error=_message_of(error))

    def _warn(self, error: Exception) -> None:
        """Warns at most once a minute."""
        if time.monotonic() - self._warned_at >= _WARN_EVERY_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("requests are not counted: the rate limit's storage fails", error=_message_of(error))


def _message_of(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it cannot be connected to in time"
    return f"{type(error).__name__}: {error}"[:200]
