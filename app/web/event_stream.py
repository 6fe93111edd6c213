"""Events as they happen: one look at the database for everybody who follows a job."""

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
"""How far a window is, is told once a second."""
_SIGN_OF_LIFE_SECONDS = 15.0
_AT_ONCE = 2000
"""Events that one look brings at most; the next goes on from there."""


MOST_FOLLOWERS = 2000
"""Streams of one service; each holds a connection."""
MOST_OF_A_KEY = 1000


class _Follower:
    """Somebody who follows a job, and the last event that was put aside for them."""

    def __init__(self, job_id: str, last: str, key_id: str | None) -> None:
        self.job_id, self.last, self.key_id = job_id, last, key_id
        self.within: WindowProgress | None = None
        """How far its window was when that was told last."""
        self.waiting: asyncio.Queue[list[JobEvent] | WindowProgress | None] = asyncio.Queue()
        """Null: the job is no longer there."""


class EventStream:
    """Looks for new events only while somebody follows a job, and for those who have read what they got."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: set[_Follower] = set()
        self._joining = threading.Lock()
        """They join from threads, while the event loop looks for them."""
        self._looking: asyncio.Task[None] | None = None

    def join(self, job_id: str, last: str = "", key_id: str | None = None) -> _Follower:
        """Somebody who will `follow`.

        Raises:
            TooManyRequests: as many follow already as one key, or this service, can have.
        """
        follower = _Follower(job_id, last, key_id)
        with self._joining:
            own = sum(each.key_id == key_id for each in self._followers)
            if own < MOST_OF_A_KEY and len(self._followers) < MOST_FOLLOWERS:
                self._followers.add(follower)
                return follower
        raise TooManyRequests(
            f"{own} event streams of this key are open already: close some, or poll GET "
            "…/training/{id}/events instead.",
            retry_after_seconds=30,
        )

    async def follow(self, follower: _Follower) -> AsyncIterator[JobEvent | WindowProgress | None]:
        """A job's events behind the last one known, oldest first, to the one that ends it, or to the job's
        deletion; and between them how far a window is that takes longer than a second.

        Yields null if nothing happened for a while, so that a client that is gone is noticed.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_again_and_again())
        try:
            while True:
                try:
                    events = await asyncio.wait_for(follower.waiting.get(), _SIGN_OF_LIFE_SECONDS)
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
                if events[-1].type in ENDED:  # one before it was taken back: a timeout, by resuming the job
                    return
        finally:
            self.leave(follower)

    def leave(self, follower: _Follower) -> None:
        """Gives a place back; also that of one who never came to `follow`."""
        with self._joining:
            self._followers.discard(follower)

    async def _look_again_and_again(self) -> None:
        structlog.contextvars.clear_contextvars()  # of the request that happened to be the first
        looks = 0
        while self._followers:
            with self._joining:
                hungry = [each for each in self._followers if each.waiting.empty()]
            looks += 1
            try:
                found, gone = await to_thread.run_sync(
                    self._look, [(each.job_id, each.last) for each in hungry]
                )
                within = {}
                if looks % _LOOKS_BETWEEN_PROGRESS == 0:
                    within = await to_thread.run_sync(self._windows, {each.job_id for each in hungry})
            except SQLAlchemyError as error:
                log.warning("events cannot be read right now", error=str(error))
            else:
                for number in gone:
                    hungry[number].waiting.put_nowait(None)
                for number, events in found.items():
                    hungry[number].last = events[-1].id
                    hungry[number].waiting.put_nowait(events)
                for each in hungry:
                    now = within.get(each.job_id)
                    if now not in (None, each.within):
                        each.within = now
                        each.waiting.put_nowait(now)
            await asyncio.sleep(_LOOK_EVERY_SECONDS)

    def _windows(self, job_ids: set[str]) -> dict[str, WindowProgress]:
        """How far the windows are of jobs that run."""
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

    def _look(self, wanted: Sequence[tuple[str, str]]) -> tuple[dict[int, list[JobEvent]], list[int]]:
        """New events by the number of the one who wants them: a job, and the last event known of it; and the
        numbers of those whose job was deleted."""
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
