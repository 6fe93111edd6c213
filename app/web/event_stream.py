"""Streams events as they happen: one task reads new events from the database for all followers of jobs."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

import structlog
from anyio import to_thread
from sqlalchemy import Integer, String, column, func, or_, select, values
from sqlalchemy.exc import SQLAlchemyError

from app.contract.reports import WindowProgress
from app.contract.states import ENDED
from app.errors import TooManyRequests
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Job, JobEvent
from app.web.connections import connection_limit

log = structlog.get_logger("accrue.service")

_POLL_SECONDS = 0.25
_LOOKS_BETWEEN_PROGRESS = 4
"""The progress within a window is read on every fourth poll, that is once a second."""
_KEEPALIVE_SECONDS = 15.0
_AT_ONCE = 2000
"""The number of events after which a poll ends; the next one continues from there."""
_AT_ONCE_EACH = 50
"""The maximum number of events that one client gets per poll."""


MAX_STREAMS = 2000
"""The maximum number of streams of one service. Each holds a connection, so it is at most half of the number
of connections, and a quarter for a key: others must be able to connect."""
MAX_STREAMS_PER_KEY = 1000


class _Follower:
    """A client that follows a job, and the last event that was queued for it."""

    def __init__(self, job_id: str, last: str, key_id: str | None) -> None:
        self.job_id, self.last, self.key_id = job_id, last, key_id
        self.served_at = 0
        """The poll that last found events for it."""
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
            connections = connection_limit()
            most_own = min(MAX_STREAMS_PER_KEY, connections // 4)
            if own < most_own and len(self._followers) < min(MAX_STREAMS, connections // 2):
                self._followers.add(follower)
                return follower
        open_now = f"{own} event streams of this key" if own >= most_own else "Too many event streams"
        raise TooManyRequests(
            f"{open_now} are open already: close some, or poll GET …/training/{{id}}/events instead.",
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
                ready = sorted(
                    (each for each in self._followers if each.waiting.empty()),
                    key=lambda each: each.served_at,
                )
            looks += 1
            try:
                found, gone = await to_thread.run_sync(self._new_events, ready)
                within = {}
                if looks % _LOOKS_BETWEEN_PROGRESS == 0:
                    within = await to_thread.run_sync(self._windows, {each.job_id for each in ready})
            except SQLAlchemyError as error:
                log.warning("events cannot be read right now", error=str(error))
            else:
                for number in gone:
                    ready[number].waiting.put_nowait(None)
                for number, events in found.items():
                    ready[number].last, ready[number].served_at = events[-1].id, looks
                    ready[number].waiting.put_nowait(events)
                for each in ready:
                    now = within.get(each.job_id)
                    if now not in (None, each.within):
                        each.within = now
                        each.waiting.put_nowait(now)
            await asyncio.sleep(_POLL_SECONDS)

    def _windows(self, job_ids: set[str]) -> dict[str, WindowProgress]:
        """The progress of running jobs within their current windows, or in preparing their data."""
        running = select(Job.id, Job.attempt, Job.progress).where(
            Job.status == "running", Job.id.in_(job_ids)
        )
        with self._database.reading() as session:
            return {
                job_id: WindowProgress(
                    attempt=attempt,
                    step=progress.get("step", 0),
                    micro_step=progress.get("micro_step", 0),
                    accumulation_step=progress.get("accumulation_step", 0),
                    prepared_samples=progress.get("prepared_samples"),
                    samples_to_prepare=progress.get("samples_to_prepare"),
                )
                for job_id, attempt, progress in session.execute(running)
                if progress.get("within_window") or progress.get("samples_to_prepare")
            }

    def _new_events(self, ready: Sequence[_Follower]) -> tuple[dict[int, list[JobEvent]], list[int]]:
        """Reads new events, for each key in turn, until there are `_AT_ONCE` of them after a round.

        Args:
            ready: the followers that have read all their events.

        Returns:
            New events by the follower's index, and the indices of followers that will get no others.
        """
        found: dict[int, list[JobEvent]] = {}
        if not ready:
            return found, []
        with self._database.reading() as session:
            counts, gone = self._count_new(session, ready)
            by_job: dict[tuple[str, str], list[JobEvent]] = {}
            for number in in_turns(counts, {number: ready[number].key_id for number in counts}, _AT_ONCE):
                at = (ready[number].job_id, ready[number].last)
                if at not in by_job:
                    by_job[at] = list(
                        session.scalars(
                            select(JobEvent)
                            .where(JobEvent.job_id == at[0], JobEvent.id > at[1])
                            .order_by(JobEvent.id)
                            .limit(_AT_ONCE_EACH)
                        )
                    )
                found[number] = by_job[at]
        return found, gone

    def _count_new(self, session: Session, ready: Sequence[_Follower]) -> tuple[dict[int, int], list[int]]:
        """The number of new events of each follower that has any, counted up to `_AT_ONCE_EACH`; and the
        followers that will get no others: their job was deleted, or has ended. Followers that have read a job
        up to the same event are counted together."""
        alike: dict[tuple[str, str], list[int]] = {}
        for number, each in enumerate(ready):
            alike.setdefault((each.job_id, each.last), []).append(number)
        groups = list(alike.values())
        followed = (
            values(column("number", Integer), column("job_id", String), column("last", String))
            .data([(number, *read) for number, read in enumerate(alike)])
            .cte("followed")
        )
        newer = (
            select(JobEvent.id)
            .where(JobEvent.job_id == followed.c.job_id, JobEvent.id > followed.c.last)
            .limit(_AT_ONCE_EACH)
            .correlate(followed)
        )
        count = select(func.count()).select_from(newer.subquery()).correlate(followed).scalar_subquery()
        without = select(followed.c.number).outerjoin(Job, Job.id == followed.c.job_id)
        # Before the events are counted: on PostgreSQL, a job may end between two statements, and its last
        # event must be counted then.
        over = list(session.scalars(without.where(or_(Job.id.is_(None), Job.status.in_(ENDED)))))
        rows = session.execute(select(followed.c.number, count)).all()
        found = {number: own for group, own in rows if own for number in groups[group]}
        return found, [number for group in over for number in groups[group] if number not in found]


def in_turns(counts: Mapping[int, int], keys: Mapping[int, str | None], most: int) -> list[int]:
    """The followers that are served now: the keys take turns, until `most` events are reached.

    Args:
        counts: the number of new events of each follower.
        keys: each follower's key.
    """
    by_key: dict[str | None, deque[int]] = {}
    for number in counts:
        by_key.setdefault(keys[number], deque()).append(number)
    served: list[int] = []
    total = 0
    while by_key and total < most:
        for key in list(by_key):
            number = by_key[key].popleft()
            served.append(number)
            total += counts[number]
            if not by_key[key]:
                del by_key[key]
    return served
