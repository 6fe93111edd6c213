"""What happens to a job, as people read it later."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.database import database_now
from app.ids import new_id
from app.models import Job, JobEvent
from app.schemas.run import Level


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
    session.add(
        JobEvent(
            id=new_id("ftevent"),
            job_id=job.id,
            attempt=job.attempt,
            created_at=session.scalar(select(database_now())),
            level=level,
            type=kind,
            message=message,
            data=data or {},
        )
    )
