"""Exports as rows: the service inserts them, a worker's export process claims them and stores the result.

The files are in `runs/<job>/exports/<id>/<attempt>` in the data folder, which the service and the worker
share, or in object storage.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import aliased

from app.contract.export import ExportOrder, ExportResult
from app.contract.text import storable, storable_values
from app.devices import live_workers
from app.errors import Conflict
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database, database_now
from app.storage.ids import new_id
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import Export, Job

CLAIM_SECONDS = 15.0
"""Seconds after which a claim that was not renewed ends: the process that claimed it has ended."""

RENEWAL_SECONDS = 3.0
MAX_ATTEMPTS = 2
"""How many times an export is tried: one that ends the process twice has failed."""

MAX_KEPT = 20
"""The maximum number of exports of a job that exist at the same time."""


@dataclass(frozen=True)
class Claimed:
    """An export that a process makes."""

    id: str
    job_id: str
    order: dict[str, Any]
    attempts: int


def folder_of(settings: Settings, job_id: str, export_id: str, attempt: int) -> Path:
    """Where an attempt makes an export; its files are in `files` below."""
    return settings.runs_dir / job_id / "exports" / export_id / str(attempt)


def add(session: Session, job_id: str, order: ExportOrder) -> Export:
    """Stores an order.

    Raises:
        Conflict: no worker is running, or the job has too many exports.
    """
    if not live_workers.any_alive(session):
        raise Conflict("No worker is running to make the export: start one with accrue worker.")
    count = select(func.count()).select_from(Export).where(Export.job_id == job_id)
    if session.execute(count).scalar_one() >= MAX_KEPT:
        raise Conflict(f"The job has {MAX_KEPT} exports: delete some of them first.")
    export = Export(
        id=new_id("export"),
        job_id=job_id,
        created_at=session.execute(select(database_now())).scalar_one(),
        status="queued",
        order=storable_values(order.model_dump(mode="json")),
    )
    session.add(export)
    session.flush()
    return export


def exists(session: Session, export_id: str) -> bool:
    """Whether an export was not deleted."""
    query = select(Export.id).where(Export.id == export_id)
    return session.execute(query, execution_options=OF_EVERYONE).first() is not None


def of_job(session: Session, job_id: str) -> list[Export]:
    """A job's exports, newest first."""
    return list(session.scalars(select(Export).where(Export.job_id == job_id).order_by(Export.id.desc())))


def find(session: Session, job_id: str, export_id: str) -> Export | None:
    """An export of a job."""
    found = session.get(Export, export_id)
    return found if found is not None and found.job_id == job_id else None


def remove(database: Database, settings: Settings, job_id: str, export_id: str) -> None:
    """Deletes an export with its files; a process that is making it notices when it next renews its claim."""
    with database.writing() as session:
        session.execute(delete(Export).where(Export.id == export_id, Export.job_id == job_id))
    stored_files.remove_export(settings, job_id, export_id)


def _is_unclaimed() -> ColumnElement[bool]:
    """The condition that an export is wanted, and that no process is making it."""
    silent = Export.claimed_at < database_now() - CLAIM_SECONDS
    return or_(Export.status == "queued", and_(Export.status == "running", silent))


def any_unclaimed(session: Session) -> bool:
    """Whether an export waits for a process."""
    query = select(Export.id).where(_is_unclaimed()).limit(1)
    return session.execute(query, execution_options=OF_EVERYONE).first() is not None


def claim(session: Session, process: str) -> Claimed | None:
    """Claims an export that no process is making: the oldest export of the key that has gone
    longest without one being started. Exports that have been deleted since are ignored."""
    earlier, of_key = aliased(Export), aliased(Job)
    served_at = (
        select(func.coalesce(func.max(earlier.claimed_at), 0.0))
        .join(of_key, of_key.id == earlier.job_id)
        .where(of_key.owner.is_not_distinct_from(Job.owner))
        .correlate(Job)
        .scalar_subquery()
    )
    first = select(Export.id).join(Job, Job.id == Export.job_id).where(_is_unclaimed())
    first = first.order_by(served_at, Export.id).limit(1).with_for_update(skip_locked=True, of=Export)
    found = session.execute(first, execution_options=OF_EVERYONE).scalar_one_or_none()
    if found is None:
        return None
    row = session.execute(
        update(Export)
        .where(Export.id == found, _is_unclaimed())
        .values(status="running", claimed_at=database_now(), claimed_by=process, attempts=Export.attempts + 1)
        .returning(Export.id, Export.job_id, Export.order, Export.attempts)
    ).one_or_none()
    return None if row is None else Claimed(row.id, row.job_id, row.order, row.attempts)


def renew(session: Session, process: str, export_id: str) -> bool:
    """Renews a claim. Returns whether the process still has it: the export may have been deleted."""
    own = Export.id == export_id, Export.claimed_by == process, Export.status == "running"
    renewed = update(Export).where(*own).values(claimed_at=database_now()).returning(Export.id)
    return session.execute(renewed).one_or_none() is not None


def finish(session: Session, process: str, export_id: str, result: ExportResult) -> bool:
    """Stores how an export ended. Returns whether the process still had it."""
    own = Export.id == export_id, Export.claimed_by == process, Export.status == "running"
    values = {
        "status": "succeeded" if result.error is None else "failed",
        "result": storable_values(result.model_dump(mode="json")),
        "error": None if result.error is None else storable(result.error),
        "finished_at": database_now(),
    }
    return (
        session.execute(update(Export).where(*own).values(values).returning(Export.id)).one_or_none()
        is not None
    )


def release(session: Session, process: str, export_id: str) -> None:
    """Puts a claimed export back into the queue, where another process may claim it at once. That claim gets
    the same attempt number, so the caller must have removed everything that this attempt wrote. Does nothing
    if the process no longer has the claim."""
    own = Export.id == export_id, Export.claimed_by == process, Export.status == "running"
    session.execute(
        update(Export).where(*own).values(status="queued", claimed_by=None, attempts=Export.attempts - 1)
    )
