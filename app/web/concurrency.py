"""Limits on requests that take long or much memory: slow transfers, large bodies, work that takes seconds."""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from anyio import CapacityLimiter, Semaphore, to_thread

from app.errors import TooManyRequests

Result = TypeVar("Result")

_THREADS, _THREADS_PER_KEY = 8, 2
_MAX_WAITING_PER_KEY = 100

_SHARED_THREADS, _WRITING_THREADS, _SHARED_THREADS_PER_KEY = 40, 24, 8
"""The threads of anyio, which all requests share; how many of them writing requests may use; and how many the
requests of one key that read, and as many that write."""


class ConcurrencyLimit:
    """A limit on requests of one kind (uploads, comparisons, …) that are in progress at the same time, per
    key and in total.

    Args:
        what: their name in error messages, in the plural.
    """

    def __init__(self, what: str, *, per_key: int, total: int) -> None:
        self._what, self._per_key, self._total = what, per_key, total
        self._open: Counter[str | None] = Counter()
        self._counting = threading.Lock()

    def acquire(self, key_id: str | None) -> Callable[[], None]:
        """Counts one more request. Returns a function that must be called once at its end.

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
        """Counts a request for the duration of the block.

        Raises:
            TooManyRequests: the key, or all keys together, have reached the maximum.
        """
        end = self.acquire(key_id)
        try:
            yield
        finally:
            end()


class Turns:
    """Lets a few requests at a time continue, and of each key fewer; others wait for their turn.

    Args:
        without_key: how many continue of a service that has no keys; None: as many as of a key.
    """

    def __init__(self, *, per_key: int, total: int, without_key: int | None = None) -> None:
        self._per_key, self._without_key = per_key, without_key or per_key
        self._all = Semaphore(total, fast_acquire=True)
        self._of_keys: dict[str | None, Semaphore] = {}
        self._requests: Counter[str | None] = Counter()

    def requests(self, key_id: str | None) -> int:
        """How many requests of a key have a turn or wait for one."""
        return self._requests[key_id]

    @asynccontextmanager
    async def turn(self, key_id: str | None) -> AsyncIterator[None]:
        """Waits for the turn of a request, which lasts until the end of the block."""
        most = self._without_key if key_id is None else self._per_key
        own = self._of_keys.setdefault(key_id, Semaphore(most, fast_acquire=True))
        self._requests[key_id] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._requests[key_id] -= 1
            if not self._requests[key_id]:
                del self._requests[key_id], self._of_keys[key_id]


class ThreadTurns:
    """Turns among the threads that all requests share. On SQLite, writes may wait for each other for seconds,
    so they never occupy all threads, and reads do not wait for their turns."""

    def __init__(self) -> None:
        threads = {"total": _SHARED_THREADS, "without_key": _SHARED_THREADS}
        self.reads = Turns(per_key=_SHARED_THREADS_PER_KEY, **threads)
        writing = {"total": _WRITING_THREADS, "without_key": _WRITING_THREADS}
        self.writes = Turns(per_key=_SHARED_THREADS_PER_KEY, **writing)

    async def read(self, key_id: str | None, work: Callable[[], Result]) -> Result:
        """The result of work that takes milliseconds and writes nothing, once it is the key's turn."""
        async with self.reads.turn(key_id):
            return await to_thread.run_sync(work)


async def in_turns(
    run: Callable[[Callable[[], Result | None]], Awaitable[Result | None]], parts: Iterator[Result]
) -> AsyncIterator[Result]:
    """The parts of a stream, each of which is made when it is its key's turn.

    Args:
        run: runs the making of a part (`SlowWork.go_on` for a key).
    """
    while (part := await run(lambda: next(parts, None))) is not None:
        yield part


class SlowWork:
    """Runs work that may take seconds in a few threads of its own, so that other requests always find a
    thread, and no key occupies all of these. Work waits until one of them is free.
    """

    def __init__(self) -> None:
        self._turns = Turns(per_key=_THREADS_PER_KEY, total=_THREADS)
        self._threads = CapacityLimiter(_THREADS)

    async def run(self, key_id: str | None, work: Callable[[], Result]) -> Result:
        """The result of `work`.

        Raises:
            TooManyRequests: too many requests of the key wait already.
        """
        if (requests := self._turns.requests(key_id)) >= _MAX_WAITING_PER_KEY:
            raise TooManyRequests(
                f"{requests} slow requests of this key are already waiting: try again once some have ended.",
                retry_after_seconds=5,
            )
        return await self.go_on(key_id, work)

    async def go_on(self, key_id: str | None, work: Callable[[], Result]) -> Result:
        """As `run`, for the next part of a request that has been admitted: it is never refused."""
        async with self._turns.turn(key_id):
            return await to_thread.run_sync(work, limiter=self._threads)
