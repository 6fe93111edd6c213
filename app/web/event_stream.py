"""Streams events as they happen: one database query serves all followers of jobs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import structlog
from anyio import to_thread
from sqlalchemy import Integer, String, and_, column, select, values
from sqlalchemy.exc import SQLAlchemyError

from app.contract.reports import WindowProgress
from app.contract.states import ENDED
from app.errors import TooManyRequests
from app.storage.database import Database
from app.storage.tables import Job, JobEvent

log = structlog.get_logger("accrue.service")

_LOOK_EVERY_SECONDS = 0.25
_LOOKS_BETWEEN_PROGRESS = 4
"""The progress within a window is read on every fourth poll, that is once a second."""
_KEEPALIVE_SECONDS = 15.0
_AT_ONCE = 2000
"""The maximum number of events per query; the next query continues from there."""


MAX_STREAMS = 2000
"""The maximum number of streams of one service; each holds a connection."""
MAX_STREAMS_PER_KEY = 1000


class _Follower:
    """A client that follows a job, and the last event that was queued for it."""

    def __init__(self, job_id: str, last: str, key_id: str | None) -> None:
        self.job_id, self.last, self.key_id = job_id, last, key_id
        self.within: WindowProgress | None = None
        """The progress within the window that was sent last."""
        self.waiting: asyncio.Queue[list[JobEvent] | WindowProgress | None] = asyncio.Queue()
        """None means that the job has been deleted."""


class EventStream:
    """Polls for new events only while clients follow jobs, and only for clients that have read all their
    events."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: set[_Follower] = set()
        self._joining = threading.Lock()
        """Clients join from threads while the event loop iterates over them."""
        self._looking: asyncio.Task[None] | None = None

    def join(self, job_id: str, last: str = "", key_id: str | None = None) -> _Follower:
        """Registers a client that will call `follow`.

        Raises:
            TooManyRequests: the key or the service has reached its maximum number of streams.
        """
        follower = _Follower(job_id, last, key_id)
        with self._joining:
            own = sum(each.key_id == key_id for each in self._followers)
            if own < MAX_STREAMS_PER_KEY and len(self._followers) < MAX_STREAMS:
                self._followers.add(follower)
                return follower
        raise TooManyRequests(
            f"{own} event streams of this key are open already: close some, or poll GET "
            "…/training/{id}/events instead.",
            retry_after_seconds=30,
        )

    async def follow(self, follower: _Follower) -> AsyncIterator[JobEvent | WindowProgress | None]:
        """Yields a job's events after the last known one, oldest first, until the job ends or is deleted.

        Between them, it yields the progress within windows that take longer than a second, and None if
        nothing has happened for a while, so that a disconnected client is noticed.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._poll())
        try:
            while True:
                try:
                    events = await asyncio.wait_for(follower.waiting.get(), _KEEPALIVE_SECONDS)
                except TimeoutError:
                    yield None
                    continue
                if events is None:
                    return
                if isinstance(events, WindowProgress):
                    yield events
                    continue
                for event in events:
                    yield event
                if (
                    events[-1].type in ENDED
                ):  # an earlier end does not count: the job was resumed after a timeout
                    return
        finally:
            self.leave(follower)

    def leave(self, follower: _Follower) -> None:
        """Removes a client, even one that never called `follow`."""
        with self._joining:
            self._followers.discard(follower)

    async def _poll(self) -> None:
        structlog.contextvars.clear_contextvars()  # drop the context of the request that started this task
        looks = 0
        while self._followers:
            with self._joining:
                ready = [each for each in self._followers if each.waiting.empty()]
            looks += 1
            try:
                found, gone = await to_thread.run_sync(
                    self._new_events, [(each.job_id, each.last) for each in ready]
                )
                within = {}
                if looks % _LOOKS_BETWEEN_PROGRESS == 0:
                    within = await to_thread.run_sync(self._windows, {each.job_id for each in ready})
            except SQLAlchemyError as error:
                log.warning("events cannot be read right now", error=str(error))
            else:
                for number in gone:
                    ready[number].waiting.put_nowait(None)
                for number, events in found.items():
                    ready[number].last = events[-1].id
                    ready[number].waiting.put_nowait(events)
                for each in ready:
                    now = within.get(each.job_id)
                    if now not in (None, each.within):
                        each.within = now
                        each.waiting.put_nowait(now)
            await asyncio.sleep(_LOOK_EVERY_SECONDS)

    def _windows(self, job_ids: set[str]) -> dict[str, WindowProgress]:
        """The progress within the current windows of running jobs."""
        running = select(Job.id, Job.attempt, Job.progress).where(
            Job.status == "running", Job.id.in_(job_ids)
        )
        with self._database.reading() as session:
            return {
                job_id: WindowProgress(
                    attempt=attempt,
                    step=progress.get("step", 0),
                    micro_step=progress["micro_step"],
                    accumulation_step=progress["accumulation_step"],
                )
                for job_id, attempt, progress in session.execute(running)
                if progress.get("within_window")
            }

    def _new_events(self, wanted: Sequence[tuple[str, str]]) -> tuple[dict[int, list[JobEvent]], list[int]]:
        """Reads new events.

        Args:
            wanted: for each follower, the job's id and the id of the last known event.

        Returns:
            New events by the follower's index, and the indices of followers whose job was deleted.
        """
        found: dict[int, list[JobEvent]] = {}
        if not wanted:
            return found, []
        followed = (
            values(column("number", Integer), column("job_id", String), column("last", String))
            .data([(number, *each) for number, each in enumerate(wanted)])
            .cte("followed")
        )
        query = (
            select(followed.c.number, JobEvent)
            .join(JobEvent, and_(JobEvent.job_id == followed.c.job_id, JobEvent.id > followed.c.last))
            .order_by(followed.c.number, JobEvent.id)
            .limit(_AT_ONCE)
        )
        with self._database.reading() as session:
            for number, event in session.execute(query):
                found.setdefault(number, []).append(event)
            without = select(followed.c.number).outerjoin(Job, Job.id == followed.c.job_id)
            gone = list(session.scalars(without.where(Job.id.is_(None))))
        return found, gone
