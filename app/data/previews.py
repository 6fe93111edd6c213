"""Looks at data sets as the trainer will see them: asked for by the service, made by a worker's profiler.

The service has no tokenizers, and should run none: a chat template is a program. What is found is training
text, so it stays in the database only until it is read.
"""

import time

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from app import workers_seen
from app.database import Database, database_now
from app.errors import Conflict, Unavailable, Unprocessable
from app.ids import new_id
from app.models import PreviewRequest
from app.schemas.preview import DatasetPreview, PreviewOrder

_LOOKED_AT_EVERY = 0.02
_FORGOTTEN_AFTER = 600.0
"""Seconds after which nobody waits: the service that asked has gone."""


def ask(database: Database, order: PreviewOrder, seconds: float) -> DatasetPreview:
    """Has it made, and waits for it.

    Raises:
        Unprocessable: the trainer could not read the data with that model either; the message says why.
        Conflict: no worker is here.
        Unavailable: none had time.
    """
    request_id = _want(database, order)
    try:
        return _wait(database, request_id, time.monotonic() + seconds)
    finally:
        with database.writing() as session:
            session.execute(delete(PreviewRequest).where(PreviewRequest.id == request_id))


def claim(session: Session) -> PreviewRequest | None:
    """The oldest request that nobody works on."""
    oldest = (
        select(PreviewRequest.id)
        .where(PreviewRequest.claimed_at.is_(None))
        .order_by(PreviewRequest.id)
        .limit(1)
        .scalar_subquery()
    )
    return session.scalars(
        update(PreviewRequest)
        .where(PreviewRequest.id == oldest, PreviewRequest.claimed_at.is_(None))
        .values(claimed_at=database_now())
        .returning(PreviewRequest)
    ).one_or_none()


def waiting(session: Session) -> bool:
    """Whether anybody waits for a look that nobody takes."""
    free = PreviewRequest.claimed_at.is_(None)
    return session.scalar(select(PreviewRequest.id).where(free).limit(1)) is not None


def store(session: Session, request_id: str, made: DatasetPreview | None, error: str | None = None) -> None:
    """Gives what was found to whoever waits, or why there is nothing."""
    values = {"answer": made.model_dump(mode="json") if made is not None else None, "error": error}
    session.execute(update(PreviewRequest).where(PreviewRequest.id == request_id).values(values))


def _want(database: Database, order: PreviewOrder) -> str:
    request = PreviewRequest(
        id=new_id("preview"),
        created_at=database_now(),
        file_id=order.data.file_id,
        order=order.model_dump(mode="json"),
    )
    with database.writing() as session:
        if not workers_seen.any_alive(session):
            raise Conflict("No worker is here to read the data with the model's tokenizer: accrue worker.")
        old = PreviewRequest.created_at < database_now() - _FORGOTTEN_AFTER
        session.execute(delete(PreviewRequest).where(old))
        session.add(request)
        session.flush()
        return request.id


def _wait(database: Database, request_id: str, until: float) -> DatasetPreview:
    query = select(PreviewRequest.answer, PreviewRequest.error).where(PreviewRequest.id == request_id)
    while time.monotonic() < until:
        with database.reading() as session:
            answer, error = session.execute(query).one()
        if error is not None:
            raise Unprocessable(f"{error}.", field="model_name")
        if answer is not None:
            return DatasetPreview.model_validate(answer)
        time.sleep(_LOOKED_AT_EVERY)
    raise Unavailable(
        "The worker has not come to it yet: ask again in a moment. One with ACCRUE_PROFILER=false never does."
    )
