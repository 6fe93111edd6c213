"""Group commit: the writes of concurrent callers share one transaction.

A commit waits for the disk, and Python threads do not compute in parallel. So one thread collects the
writes that arrived while it was busy, prepares each, writes all of them and commits once; only then do the
callers get their results. A write that fails is rolled back alone; if the commit fails, it fails for all of
them. Keys take turns, so that a burst of one key's writes delays those of other keys by little.
"""

import asyncio
import contextvars
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.storage.database import Database, LostTransaction, is_deadlock

_MAX_GROUP = 50
"""The maximum number of writes in a transaction, since other threads need the database too."""

_PREPARE_SECONDS = 0.1
"""For how long writes are prepared before those that are ready are committed."""

Ready = TypeVar("Ready")
Written = TypeVar("Written")


@dataclass
class _Write:
    prepare: Callable[[], Any]
    write: Callable[[Any, Database], Any]
    database: Database
    """The database with the caller's view."""
    context: contextvars.Context
    outcome: "asyncio.Future[Any]"
    result: Any = None
    error: BaseException | None = None

    def resolve(self) -> None:
        if self.outcome.done():  # the client is gone
            return
        if self.error is None:
            self.outcome.set_result(self.result)
        else:
            self.outcome.set_exception(self.error)


class _WaitingWrites:
    """Writes that wait, of which `take` returns one of each key in turn."""

    def __init__(self) -> None:
        self._of_keys: OrderedDict[str | None, deque[_Write]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, write: _Write) -> None:
        with self._changed:
            self._of_keys.setdefault(write.database.viewer.creator, deque()).append(write)
            self._changed.notify()

    def close(self) -> None:
        """Lets `take` return None once no write waits, instead of waiting for the next."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, *, wait: bool) -> _Write | None:
        """The next write; None if there is none, and there will be none or the caller does not wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._of_keys or self._is_closed or not wait)
            if not self._of_keys:
                return None
            key, own = self._of_keys.popitem(last=False)
            taken = own.popleft()
            if own:
                self._of_keys[key] = own  # behind the other keys
            return taken


class GroupCommit:
    """Accepts writes between `start()`, which must be called in the event loop, and `close()`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting = _WaitingWrites()
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Returns once everything has been written, or after ten seconds."""
        self._waiting.close()
        self._thread.join(10)

    async def write(
        self, database: Database, prepare: Callable[[], Ready], write: Callable[[Ready, Database], Written]
    ) -> Written:
        """The result of `write`, once it is on disk.

        Args:
            database: the caller's view of the database.
            prepare: runs before the transaction; raises an error if nothing shall be written.
            write: receives the result of `prepare`, and the database within the transaction.
        """
        outcome = self._loop.create_future()
        self._waiting.put(_Write(prepare, write, database, contextvars.copy_context(), outcome))
        written: Written = await outcome
        return written

    def _run(self) -> None:
        while (first := self._waiting.take(wait=True)) is not None:
            group, ready = self._prepared(first)
            self._commit(ready)
            self._loop.call_soon_threadsafe(_resolve_all, group)

    def _prepared(self, first: _Write) -> tuple[list[_Write], list[tuple[_Write, Any]]]:
        """Prepares the first write and those that follow. Returns all of them, and those that can be written,
        each with the result of its preparation."""
        group: list[_Write] = []
        ready: list[tuple[_Write, Any]] = []
        until = time.monotonic() + _PREPARE_SECONDS
        following: _Write | None = first
        while following is not None:
            group.append(following)
            try:
                ready.append((following, following.context.run(following.prepare)))
            except Exception as error:
                following.error = error
            is_full = len(group) == _MAX_GROUP or time.monotonic() > until
            following = None if is_full else self._waiting.take(wait=False)
        return group, ready

    def _commit(self, ready: Sequence[tuple[_Write, Any]]) -> None:
        if ready:
            self._write_together(ready)
        for each, prepared in ready:
            # Two services may wait for each other's locks. A write on its own holds only one lock at a time.
            if is_deadlock(each.error):
                each.error = None
                self._write_together([(each, prepared)])

    def _write_together(self, ready: Sequence[tuple[_Write, Any]]) -> None:
        try:
            with self._database.transaction() as transaction:
                for each, prepared in ready:
                    within = each.database.within(transaction)
                    try:
                        each.result = each.context.run(each.write, prepared, within)
                    except LostTransaction:
                        raise
                    except Exception as error:
                        each.error = error
        except LostTransaction as lost:
            _fail(ready, lost.__cause__)
        except Exception as error:
            _fail(ready, error)


def _fail(ready: Sequence[tuple[_Write, Any]], reason: BaseException | None) -> None:
    for each, _ in ready:
        each.error = each.error or reason


def _resolve_all(group: Sequence[_Write]) -> None:
    for each in group:
        each.resolve()
