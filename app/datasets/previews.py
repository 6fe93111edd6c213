"""Previews of datasets as the trainer will see them: requested by the service, made by a worker's profiler.

The service has no tokenizers and should not run any: a chat template is a program. A preview contains
training text, so the database keeps it only until the requester has read it.
"""

import time

from anyio import CancelScope, to_thread
from sqlalchemy import ColumnElement, and_, delete, func, not_, or_, select, update

from app.contract.preview import DatasetPreview, PreviewSpec
from app.contract.text import storable, storable_values
from app.datasets import lengths
from app.devices import live_workers
from app.errors import Conflict, NotFound, Unavailable, Unprocessable
from app.storage.database import Database, database_now
from app.storage.ids import new_id
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import File, PreviewRequest
from app.storage.waits import Gone, never, until_found

_CLAIM_SECONDS = 45.0
"""Seconds after which a claimed request without an answer is free again: more than a preview may take."""

_EXPIRY_SECONDS = 600.0
"""Requests older than this many seconds are deleted: no service waits for them any more."""


async def ask(database: Database, order: PreviewSpec, seconds: float, gone: Gone = never) -> DatasetPreview:
    """Requests a preview, and waits for it without holding a thread.

    Raises:
        Unprocessable: the data cannot be read with this model, by the worker that previews it or by a
            trainer; the message says why.
        Conflict: no worker is running.
        Unavailable: no worker made the preview in time.
    """
    request_id = await to_thread.run_sync(_insert_request, database, order)
    try:
        found = await until_found(lambda: _read_preview(database, request_id), seconds, gone)
    finally:
        with CancelScope(shield=True):  # even if the client has disconnected
            await to_thread.run_sync(_forget, database, request_id)
    if found is None:
        raise Unavailable(
            "No worker has made the preview yet: try again in a moment. Workers with ACCRUE_PROFILER=false "
            "make no previews."
        )
    return found


def claim(session: Session, served: dict[str | None, float]) -> PreviewRequest | None:
    """The next request to work on. Previews come before lengths, because clients wait for them. Owners take
    turns. Of an owner's previews, the oldest comes first; lengths have no particular order.

    Args:
        served: the monotonic time at which each owner was last served; updated in place.
    """
    oldest = (
        select(func.min(PreviewRequest.id), File.owner)
        .join(File, File.id == PreviewRequest.file_id)
        .where(_free())
        .group_by(File.owner)
    )
    waiting = session.execute(oldest, execution_options=OF_EVERYONE).all()
    if not waiting:
        return None
    request_id, owner = min(
        waiting,
        key=lambda each: (each[0].startswith(lengths.PREFIX), served.get(each[1], 0.0), each[0]),
    )
    served[owner] = time.monotonic()
    return session.scalars(
        update(PreviewRequest)
        .where(PreviewRequest.id == request_id, _free())
        .values(claimed_at=database_now())
        .returning(PreviewRequest)
    ).one_or_none()


def has_unclaimed(session: Session) -> bool:
    """Whether any requested preview is still unclaimed."""
    return session.scalar(select(PreviewRequest.id).where(_free()).limit(1)) is not None


def _free() -> ColumnElement[bool]:
    """The condition that nobody works on a request, as after its profiler was killed."""
    claimed = PreviewRequest.claimed_at >= database_now() - _CLAIM_SECONDS
    is_open = and_(PreviewRequest.answer.is_(None), PreviewRequest.error.is_(None))
    return and_(is_open, or_(PreviewRequest.claimed_at.is_(None), not_(claimed)))


def store(session: Session, request_id: str, made: DatasetPreview | None, error: str | None = None) -> None:
    """Stores a preview, or the reason why there is none, for the request that waits for it."""
    request = session.get(PreviewRequest, request_id)
    if made is not None and request is not None:
        lengths.keep(session, request, made.lengths)
    answer = storable_values(made.model_dump(mode="json")) if made is not None else None
    values = {"answer": answer, "error": error and storable(error)}
    session.execute(update(PreviewRequest).where(PreviewRequest.id == request_id).values(values))


def _insert_request(database: Database, order: PreviewSpec) -> str:
    request = PreviewRequest(
        id=new_id("preview"),
        created_at=database_now(),
        file_id=order.data.file_id,
        order=order.model_dump(mode="json"),
    )
    with database.writing() as session:
        if not live_workers.any_alive(session):
            raise Conflict(
                "No worker is running to read the data with the model's tokenizer: start one with "
                "accrue worker."
            )
        old = PreviewRequest.created_at < database_now() - _EXPIRY_SECONDS
        session.execute(delete(PreviewRequest).where(old))
        session.add(request)
        session.flush()
        return request.id


def _read_preview(database: Database, request_id: str) -> DatasetPreview | None:
    query = select(PreviewRequest.answer, PreviewRequest.error).where(PreviewRequest.id == request_id)
    with database.reading() as session:
        row = session.execute(query).one_or_none()
    if row is None:
        raise NotFound("The file has been deleted.")
    if row.error is not None:
        raise Unprocessable(f"{row.error}.", field="model_name")
    return None if row.answer is None else DatasetPreview.model_validate(row.answer)


def _forget(database: Database, request_id: str) -> None:
    with database.writing() as session:
        session.execute(delete(PreviewRequest).where(PreviewRequest.id == request_id))
