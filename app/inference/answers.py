"""Delivers the parts of answers to the requests that wait for them: one query serves all of them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import structlog
from anyio import CancelScope, to_thread
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from app.contract.inference import AnswerPart, InferenceError
from app.inference import requests
from app.storage.database import ChangeDetector, Database

log = structlog.get_logger("accrue.service")

_POLL_SECONDS = 0.005
_CHECK_SECONDS = 1.0
"""How often it is checked whether a process works on each request."""

UNCLAIMED_SECONDS = 60.0
"""Seconds that a request waits for an inference process."""

KEEPALIVE_SECONDS = 5.0
"""Seconds without a part after which a waiting request gets None, and can see whether its client has left."""


@dataclass(eq=False)
class PendingAnswer:
    """A request whose answer is awaited."""

    request_id: str
    parts: int = 0
    """How many parts were read."""
    worked_on_at: float = field(default_factory=time.monotonic)
    """When a process was last seen to work on it, or when it was made."""
    queue: asyncio.Queue[AnswerPart] = field(default_factory=asyncio.Queue)


class AnswerReader:
    """Polls for parts of answers while requests wait for any."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, PendingAnswer] = {}
        self._polling: asyncio.Task[None] | None = None

    async def parts(self, request_id: str) -> AsyncGenerator[AnswerPart | None]:
        """Yields the parts of an answer until the last one; None if there was none for some seconds. The
        request is deleted at the end, or when the client disconnects."""
        waiting = self._waiting[request_id] = PendingAnswer(request_id)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            while True:
                try:
                    part = await asyncio.wait_for(waiting.queue.get(), KEEPALIVE_SECONDS)
                except TimeoutError:
                    yield None
                    continue
                yield part
                if part.is_last:
                    return
        finally:
            del self._waiting[request_id]
            with CancelScope(shield=True):  # even if the client has disconnected
                try:
                    await to_thread.run_sync(requests.forget, self._database, request_id)
                except SQLAlchemyError:
                    log.warning("an answered request could not be deleted", request=request_id)

    async def _poll(self) -> None:
        structlog.contextvars.clear_contextvars()  # drop the context of the request that started this task
        check_at = time.monotonic() + _CHECK_SECONDS
        renew_at = time.monotonic() + requests.WAITING_SECONDS
        changes = ChangeDetector(self._database)
        while self._waiting:
            read = {each.request_id: each.parts for each in self._waiting.values()}
            try:
                if changes.any():
                    for request_id, number, part in await to_thread.run_sync(self._new_parts, read):
                        self._deliver(request_id, number, part)
                if time.monotonic() > check_at:
                    self._check(list(read), *await to_thread.run_sync(self._unclaimed, list(read)))
                    check_at = time.monotonic() + _CHECK_SECONDS
                if time.monotonic() > renew_at:
                    await to_thread.run_sync(self._keep_awaiting, list(read))
                    renew_at = time.monotonic() + requests.WAITING_SECONDS
            except (SQLAlchemyError, ValidationError) as error:
                log.warning("answers cannot be read right now", error=type(error).__name__)
                await asyncio.sleep(_CHECK_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)

    def _deliver(self, request_id: str, number: int, part: AnswerPart) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and number == waiting.parts:
            waiting.parts += 1
            waiting.worked_on_at = time.monotonic()
            waiting.queue.put_nowait(part)

    def _check(self, asked: list[str], existing: set[str], free: set[str]) -> None:
        """Ends the requests that were deleted, or that no process has worked on for too long."""
        now = time.monotonic()
        for request_id in asked:
            waiting = self._waiting.get(request_id)
            if waiting is None:
                continue
            if request_id not in existing:
                waiting.queue.put_nowait(_DELETED)
            elif request_id not in free:
                waiting.worked_on_at = now
            elif now > waiting.worked_on_at + UNCLAIMED_SECONDS:
                waiting.queue.put_nowait(_UNCLAIMED)

    def _new_parts(self, read: dict[str, int]) -> list[tuple[str, int, AnswerPart]]:
        with self._database.reading() as session:
            rows = requests.new_parts(session, read)
        return [
            (request_id, number, AnswerPart.model_validate(content)) for request_id, number, content in rows
        ]

    def _keep_awaiting(self, request_ids: list[str]) -> None:
        with self._database.writing() as session:
            requests.keep_awaiting(session, request_ids)

    def _unclaimed(self, request_ids: list[str]) -> tuple[set[str], set[str]]:
        with self._database.reading() as session:
            return requests.unclaimed(session, request_ids)


_DELETED = AnswerPart(
    error=InferenceError(status=503, code="unavailable", message="The request was deleted: send it again.")
)
_UNCLAIMED = AnswerPart(
    error=InferenceError(
        status=503,
        code="unavailable",
        message=f"No worker has taken the request within {UNCLAIMED_SECONDS:.0f} s: check that a worker is "
        "running, and that its ACCRUE_INFERENCE is not off.",
    )
)
