"""Group commit: the writes of concurrent callers share one transaction.

A commit waits for the disk, and Python threads do not compute in parallel. So one thread collects the
writes that arrived while it was busy, prepares each, writes all of them and commits once; only then do the
callers get their results. A write that fails is rolled back alone; if the commit fails, it fails for all of
them.
"""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.storage.database import Database, LostTransaction, is_deadlock

_MAX_GROUP = 50
"""The maximum number of writes in a transaction, since other threads need the database too."""

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


class GroupCommit:
    """Accepts writes between `start()`, which must be called in the event loop, and `close()`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Returns once everything has been written, or after ten seconds."""
        self._waiting.put(None)
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
        while (first := self._waiting.get()) is not None:
            group = [first]
            while len(group) < _MAX_GROUP and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    self._waiting.put(None)
                    break
                group.append(following)
            self._commit_group(group)
            self._loop.call_soon_threadsafe(_resolve_all, group)

    def _commit_group(self, group: Sequence[_Write]) -> None:
        ready: list[tuple[_Write, Any]] = []
        for each in group:
            try:
                ready.append((each, each.context.run(each.prepare)))
            except Exception as error:
                each.error = error
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
