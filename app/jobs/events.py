"""The events of a job."""

import json
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import bindparam, func, insert, select

from app.contract.reports import Level
from app.contract.text import storable, storable_values
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import Delivery, Job, JobEvent

WEBHOOK_EVENTS = ("succeeded", "failed", "cancelled", "paused")
"""Events of the service and of workers that are delivered to webhooks. Events of trainers,
such as a checkpoint, are stored by workers/ingest.py and never delivered to webhooks."""


def _insert_event(dialect: str) -> Any:
    table: Any = JobEvent.__table__
    given: dict[str, Any] = {column.name: bindparam(column.name) for column in table.columns}
    return insert(table).values(given | {"created_at": database_now(), "line": None})


_INSERT_EVENT = CompiledStatement(_insert_event)
_LAST = CompiledStatement(
    lambda dialect: select(func.max(JobEvent.id)).where(JobEvent.job_id == bindparam("job_id"))
)
_TIME = slice(len("ftevent-"), len("ftevent-") + 14)
"""The slice of an event's id that contains the time."""


def next_id(session: Session, job_id: str) -> str:
    """An id that sorts after the ids of all other events of the job, even those from a host whose clock is
    ahead, since clients that follow a job request the events after the last id they know."""
    made = new_id("ftevent")
    ((last,),) = _LAST.run(session, {"job_id": job_id})
    if last is None or made > last:
        return made
    prefix, digits = last[: _TIME.start], last[_TIME]
    return f"{prefix}{int(digits, 16) + 1:014x}{made[_TIME.stop :]}"


def record_event(
    session: Session,
    job: Job,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, Any] | None = None,
) -> None:
    """Records an event of the service or a worker, and queues its webhook (`WEBHOOK_EVENTS`)."""
    announced = f"fine_tuning.job.{kind}"
    if (
        kind in WEBHOOK_EVENTS
        and job.webhook_url is not None
        and not _is_already_pending(session, job, announced)
    ):
        now = database_now()
        session.add(
            Delivery(
                id=new_id("evt"), job_id=job.id, created_at=now, type=announced, url=job.webhook_url,
                host=urlsplit(job.webhook_url).hostname, attempts=0, not_before=now,
            )
        )  # fmt: skip
    record_event_without_webhook(session, job.id, job.attempt, kind, message, level=level, data=data)


def _is_already_pending(session: Session, job: Job, announced: str) -> bool:
    """Whether the same notification of the job still waits to be delivered."""
    same = select(Delivery.id).where(Delivery.job_id == job.id, Delivery.type == announced)
    return session.scalar(same.where(Delivery.not_before.is_not(None)).limit(1)) is not None


def is_recorded(session: Session, job_id: str, kind: str, *, times: int) -> bool:
    """Whether a job has at least `times` events of a kind."""
    own = select(JobEvent.id).where(JobEvent.job_id == job_id, JobEvent.type == kind)
    return session.scalar(own.offset(times - 1).limit(1)) is not None


def last_line(session: Session, job_id: str) -> int:
    """The offset of the last line of the job's events.jsonl that is stored; -1 if none is."""
    lines = select(func.max(JobEvent.line)).where(JobEvent.job_id == job_id)
    found: int | None = session.scalar(lines)
    return -1 if found is None else found


def record_event_without_webhook(
    session: Session,
    job_id: str,
    attempt: int,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, Any] | None = None,
) -> None:
    """Records an event of a job that is in the database, by the job's id."""
    values = {
        "id": next_id(session, job_id),
        "job_id": job_id,
        "attempt": attempt,
        "level": level,
        "type": kind,
    }
    _INSERT_EVENT.run(
        session, values | {"message": storable(message), "data": json.dumps(storable_values(data or {}))}
    )
