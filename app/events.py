"""What happens to a job, as people read it later."""

from typing import Any

from sqlalchemy import bindparam, insert
from sqlalchemy.orm import Session

from app.database import database_now
from app.ids import new_id
from app.models import Job, JobEvent
from app.schemas.run import Level

_TABLE: Any = JobEvent.__table__
_TELL = insert(_TABLE).values(
    {column.name: bindparam(column.name) for column in _TABLE.columns}
    | {"created_at": database_now(), "line": None}
)


def tell(
    session: Session,
    job: Job,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, Any] | None = None,
) -> None:
    """Adds an event of the service's or the worker's own."""
    tell_of(session, job.id, job.attempt, kind, message, level=level, data=data)


def tell_of(
    session: Session,
    job_id: str,
    attempt: int,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    data: dict[str, Any] | None = None,
) -> None:
    """The same of a job by its id, which is in the database by now."""
    told = {"id": new_id("ftevent"), "job_id": job_id, "attempt": attempt, "level": level, "type": kind}
    session.connection().execute(_TELL, told | {"message": message, "data": data or {}})
