"""The lengths of a file's samples in tokens: measured once by a worker, so that a job is planned for the
samples that it has instead of for samples of `max_length`.

A request for lengths is a request for a preview that shows no samples (`previews.py`); its answer is kept.
"""

import hashlib

from sqlalchemy import delete, func, select

from app.contract.preview import Lengths, PreviewSpec
from app.contract.spec import DataSpec, Spec
from app.devices import live_workers
from app.storage.database import Database, database_now, insert_for
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import File, PreviewRequest, StoredLengths
from app.storage.waits import Gone, never, until_found

PREFIX = "tokens-"
"""The ids of requests for lengths begin with this."""
_MOST_KEPT = 10_000
_MOST_OPEN = 4
"""The maximum number of requests of one owner, open or failed: each takes the profiler a second or more."""
_FORGOTTEN_AFTER_SECONDS = 600.0
"""Requests, and errors, are forgotten after this time, so that they are made again."""


def measurement_request(spec: Spec) -> PreviewSpec | None:
    """What to measure for a job. None if rows are packed or the model is compiled, since all rows are then of
    `max_length`; or if there is a validation file, which is not measured."""
    data = spec.data
    if data.packing or spec.compile or (data.validation is not None and data.validation.file_id is not None):
        return None
    return PreviewSpec(model=spec.model, data=data.model_copy(update={"validation": None}), shown=0)


def find(session: Session, order: PreviewSpec) -> Lengths | None:
    """The measured lengths; None if there are none yet."""
    content = session.scalar(select(StoredLengths.content).where(StoredLengths.key == _key(order)))
    return None if content is None else Lengths.model_validate(content)


def request(session: Session, order: PreviewSpec) -> bool:
    """Requests a measurement without waiting for it. Returns False if no worker is running, if the request
    exists already, or if the file's owner has too many requests that are open or have failed."""
    if not live_workers.any_alive(session):
        return False
    now = session.execute(select(database_now())).scalar_one()
    is_old = PreviewRequest.created_at < now - _FORGOTTEN_AFTER_SECONDS
    session.execute(delete(PreviewRequest).where(PreviewRequest.id.startswith(PREFIX), is_old))
    owner = select(File.owner).where(File.id == order.data.file_id).scalar_subquery()
    still_open = (
        select(func.count())
        .select_from(PreviewRequest)
        .join(File, File.id == PreviewRequest.file_id)
        .where(
            PreviewRequest.id.startswith(PREFIX),
            File.owner.is_not_distinct_from(owner),
        )
    )
    if session.execute(still_open, execution_options=OF_EVERYONE).scalar_one() >= _MOST_OPEN:
        return False
    statement = insert_for(session, PreviewRequest).values(
        id=_request_id(order),
        created_at=now,
        file_id=order.data.file_id,
        order=order.model_dump(mode="json"),
    )
    made = session.execute(
        statement.on_conflict_do_nothing(index_elements=["id"]).returning(PreviewRequest.id)
    )
    return made.one_or_none() is not None


def keep(session: Session, request: PreviewRequest, found: Lengths) -> None:
    """Keeps the lengths that a preview has measured, and deletes the request if it was for them alone."""
    order = PreviewSpec.model_validate(request.order)
    statement = insert_for(session, StoredLengths).values(
        key=_key(order),
        file_id=order.data.file_id,
        created_at=session.scalar(select(database_now())),
        content=found.model_dump(mode="json"),
    )
    session.execute(statement.on_conflict_do_nothing(index_elements=["key"]))
    if order.shown == 0:
        session.execute(delete(PreviewRequest).where(PreviewRequest.id == request.id))
    older = select(StoredLengths.key).order_by(StoredLengths.created_at.desc()).offset(_MOST_KEPT)
    session.execute(delete(StoredLengths).where(StoredLengths.key.in_(older)))


async def wait_for(database: Database, order: PreviewSpec, seconds: float, gone: Gone = never) -> None:
    """Waits, without a thread, until a requested measurement has been made or given up, or time runs out."""

    def has_ended() -> bool | None:
        still_open = select(PreviewRequest.id).where(
            PreviewRequest.id == _request_id(order), PreviewRequest.error.is_(None)
        )
        with database.reading() as session:
            return None if session.scalar(still_open) is not None else True

    await until_found(has_ended, seconds, gone)


def _request_id(order: PreviewSpec) -> str:
    return PREFIX + _key(order)


def _key(order: PreviewSpec) -> str:
    """A digest of everything that the lengths depend on."""
    content = order.model_copy(update={"shown": 0}).model_dump_json()
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def warning_of_lengths(data: DataSpec, measured: Lengths) -> str | None:
    """A warning if samples are longer than `max_length`, and will be cut off or end the job."""
    if measured.longest <= data.max_length or data.overlength == "split":
        return None
    over = max(1, measured.over_max_length)
    be = "is" if over == 1 else "are"
    what = (
        f"{over:,} of {max(over, measured.examples):,} measured samples {be} longer than max_length "
        f"{data.max_length} (the longest has {measured.longest:,} tokens)"
    )
    if data.overlength == "error":
        remedy = "raise max_length, or set another overlength"
        return f"{what}, so the job will end with the error overlength: {remedy}"
    lost = measured.without_targets
    rest = f", and in {lost:,} of the measured samples, nothing is left that counts toward the loss"
    return f"{what} and will be cut off there{rest if lost else ''}"
