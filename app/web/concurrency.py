"""Limits on requests that one client can keep open for as long as it likes, such as slow transfers."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import TooManyRequests


class ConcurrencyLimit:
    """The number of transfers in progress, per key and in total.

    Args:
        what: the transfers' name in error messages, in the plural.
    """

    def __init__(self, what: str, *, per_key: int, total: int) -> None:
        self._what, self._per_key, self._total = what, per_key, total
        self._open: Counter[str | None] = Counter()
        self._counting = threading.Lock()

    def acquire(self, key_id: str | None) -> Callable[[], None]:
        """Counts one more transfer. Returns a function that must be called once at its end.

        Raises:
            TooManyRequests: the key, or all keys together, have reached the maximum.
        """
        with self._counting:
            own = self._open[key_id]
            if own >= self._per_key or self._open.total() >= self._total:
                count, whose = (own, "this key") if own >= self._per_key else (self._total, "all keys")
                raise TooManyRequests(
                    f"{count} {self._what} of {whose} are in progress: try again once some have ended.",
                    retry_after_seconds=5,
                )
            self._open[key_id] += 1

        def end() -> None:
            with self._counting:
                self._open[key_id] -= 1
                if not self._open[key_id]:
                    del self._open[key_id]

        return end

    @contextmanager
    def counted(self, key_id: str | None) -> Iterator[None]:
        """Counts a transfer for the duration of the block.

        Raises:
            TooManyRequests: the key, or all keys together, have reached the maximum.
        """
        end = self.acquire(key_id)
        try:
            yield
        finally:
            end()
