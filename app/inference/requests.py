"""Requests for answers as rows: the service inserts them, an inference process claims them and stores the
parts of the answer, and the service deletes them once these are sent.

So a worker needs no address, requests wait while it is restarted, and it may run on another machine. The rows
contain what users write and what models answer: they exist only as long as a client waits.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Integer,
    String,
    and_,
    column,
    delete,
    insert,
    not_,
    or_,
    select,
    update,
    values,
)

from app.contract.inference import AnswerPart, InferenceOrder
from app.contract.text import storable_values
from app.devices import live_workers
from app.errors import Conflict
from app.storage.database import Database, database_now
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import AnswerPartRow, InferenceRequest

CLAIM_SECONDS = 10.0
"""Seconds after which a claim that was not renewed ends: the process that made it has ended."""

RENEWAL_SECONDS = 2.0
"""How often an inference process renews its claims."""

MAX_ATTEMPTS = 2
"""How many times a request is claimed: one that ends the process twice is not tried a third time."""

WAITING_SECONDS = 5.0
"""How often a service says which answers are still awaited."""

_ABANDONED_SECONDS = 30.0
"""Seconds after which a request whose client no longer waits is deleted: the service has stopped."""


@dataclass(frozen=True)
class Claimed:
    """A request that an inference process works on."""

    id: str
    key_id: str | None
    order: dict[str, Any]
    attempts: int
    """How many times it was claimed, including this one."""
    parts: int
    """How many parts of its answer an earlier process has stored."""


def add(database: Database, order: InferenceOrder, key_id: str | None) -> str:
    """Stores a request, and returns its id.

    Raises:
        Conflict: no worker is running.
    """
    request = InferenceRequest(
        id=new_id("inference"),
        created_at=database_now(),
        key_id=key_id,
        awaited_at=database_now(),
        order=storable_values(order.model_dump(mode="json")),
    )
    with database.writing() as session:
        if not live_workers.any_alive(session):
            raise Conflict("No worker is running to answer: start one with accrue worker.")
        delete_abandoned(session)
        session.add(request)
        session.flush()
        return request.id


def forget(database: Database, request_id: str) -> None:
    """Deletes a request and its answer. An inference process that works on it cancels the answer when it next
    stores a part or renews its claims."""
    with database.writing() as session:
        session.execute(delete(InferenceRequest).where(InferenceRequest.id == request_id))


def keep_awaiting(session: Session, request_ids: Collection[str]) -> None:
    """Says that these answers are still awaited."""
    own = InferenceRequest.id.in_(request_ids)
    session.execute(update(InferenceRequest).where(own).values(awaited_at=database_now()))


def any_abandoned(session: Session) -> bool:
    """Whether there are requests whose client no longer waits."""
    return session.scalar(select(InferenceRequest.id).where(_is_abandoned()).limit(1)) is not None


def delete_abandoned(session: Session) -> None:
    """Deletes requests whose client no longer waits, as after the service was killed."""
    session.execute(delete(InferenceRequest).where(_is_abandoned()))


def _is_abandoned() -> ColumnElement[bool]:
    return InferenceRequest.awaited_at < database_now() - _ABANDONED_SECONDS


def _is_unclaimed() -> ColumnElement[bool]:
    """The condition that an answer is awaited, and that no process works on it."""
    unclaimed = InferenceRequest.claimed_at.is_(None)
    silent = InferenceRequest.claimed_at < database_now() - CLAIM_SECONDS
    return and_(or_(unclaimed, silent), not_(_is_abandoned()))


def any_unclaimed(session: Session) -> bool:
    """Whether a request waits for an inference process."""
    return session.scalar(select(InferenceRequest.id).where(_is_unclaimed()).limit(1)) is not None


def claim(session: Session, process: str, most: int) -> list[Claimed]:
    """Claims the oldest requests that no process works on.

    Args:
        process: the id of the inference process.
        most: the maximum number of requests.
    """
    found = list(
        session.scalars(
            select(InferenceRequest.id)
            .where(_is_unclaimed())
            .order_by(InferenceRequest.id)
            .limit(most)
            .with_for_update(skip_locked=True)
        )
    )
    if not found:
        return []
    claimed = session.execute(
        update(InferenceRequest)
        .where(InferenceRequest.id.in_(found), _is_unclaimed())
        .values(claimed_at=database_now(), claimed_by=process, attempts=InferenceRequest.attempts + 1)
        .returning(
            InferenceRequest.id, InferenceRequest.key_id, InferenceRequest.order, InferenceRequest.attempts
        )
    ).all()
    with_parts = select(AnswerPartRow.request_id, AnswerPartRow.number).where(
        AnswerPartRow.request_id.in_([row.id for row in claimed])
    )
    parts: dict[str, int] = {}
    for request_id, number in session.execute(with_parts):
        parts[request_id] = max(parts.get(request_id, 0), number + 1)
    return sorted(
        (Claimed(row.id, row.key_id, row.order, row.attempts, parts.get(row.id, 0)) for row in claimed),
        key=lambda each: each.id,
    )


def renew(session: Session, process: str, request_ids: Collection[str]) -> set[str]:
    """Renews the claims of a process. Returns the requests that it still has: others were deleted, as after
    their clients left."""
    if not request_ids:
        return set()
    own = InferenceRequest.id.in_(request_ids), InferenceRequest.claimed_by == process
    renewed = update(InferenceRequest).where(*own).values(claimed_at=database_now())
    return set(session.scalars(renewed.returning(InferenceRequest.id)))


def store(session: Session, process: str, parts: Mapping[tuple[str, int], AnswerPart]) -> set[str]:
    """Stores parts of answers, by request and number. Returns the requests that the process still has; parts
    of others are dropped."""
    request_ids = {request_id for request_id, _ in parts}
    still = set(
        session.scalars(
            select(InferenceRequest.id)
            .where(InferenceRequest.id.in_(request_ids), InferenceRequest.claimed_by == process)
            .with_for_update(read=True, key_share=True)
        )
    )
    rows = [
        {
            "request_id": request_id,
            "number": number,
            "content": storable_values(part.model_dump(mode="json", exclude_defaults=True)),
        }
        for (request_id, number), part in parts.items()
        if request_id in still
    ]
    if rows:
        session.execute(insert(AnswerPartRow), rows)
    return still


def release(session: Session, process: str, request_ids: Collection[str]) -> None:
    """Returns claimed requests, which another inference process may then claim at once."""
    own = InferenceRequest.id.in_(request_ids), InferenceRequest.claimed_by == process
    session.execute(
        update(InferenceRequest)
        .where(*own)
        .values(claimed_at=None, claimed_by=None, attempts=InferenceRequest.attempts - 1)
    )


def new_parts(session: Session, read: Mapping[str, int]) -> list[tuple[str, int, dict[str, Any]]]:
    """The parts of answers that were not read yet: request, number and content, in order.

    Args:
        read: how many parts of each request were read.
    """
    if not read:
        return []
    waiting = (
        values(column("request_id", String), column("parts", Integer)).data(list(read.items())).cte("waiting")
    )
    query = (
        select(AnswerPartRow.request_id, AnswerPartRow.number, AnswerPartRow.content)
        .join(
            waiting,
            and_(AnswerPartRow.request_id == waiting.c.request_id, AnswerPartRow.number >= waiting.c.parts),
        )
        .order_by(AnswerPartRow.request_id, AnswerPartRow.number)
    )
    return [(row.request_id, row.number, row.content) for row in session.execute(query)]


def unclaimed(session: Session, request_ids: Iterable[str]) -> tuple[set[str], set[str]]:
    """Which of these requests exist, and which of them no process works on."""
    query = select(InferenceRequest.id, _is_unclaimed()).where(InferenceRequest.id.in_(list(request_ids)))
    rows = session.execute(query).all()
    return {row[0] for row in rows}, {row[0] for row in rows if row[1]}
