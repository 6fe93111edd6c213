"""A sweep's jobs side by side, and which is the best. Jobs belong to a sweep by their metadata."""

import json
from math import isfinite
from typing import Any, Literal

from sqlalchemy import func, literal, select

from app.errors import NotFound
from app.jobs.filters import metadata_value
from app.storage.session import Session
from app.storage.tables import Job
from app.sweeps.schemas import MAX_JOBS, SweepJob, SweepList, SweepResponse, SweepSummary
from app.sweeps.variations import NAME_KEY, VALUES_KEY

_MAX_LISTED = 100

_name = metadata_value(Job.labels, literal(NAME_KEY))


def exists(session: Session, name: str) -> bool:
    """Whether the caller has a sweep of that name."""
    return session.scalar(select(Job.id).where(_name == name).limit(1)) is not None


def newest(session: Session) -> SweepList:
    """The caller's newest sweeps."""
    query = select(
        _name.label("name"), func.min(Job.created_at).label("created_at"), func.count().label("jobs")
    )
    query = query.where(_name.is_not(None)).group_by(_name).order_by(func.max(Job.id).desc())
    rows = session.execute(query.limit(_MAX_LISTED)).all()
    return SweepList(
        data=[SweepSummary(name=row.name, created_at=int(row.created_at), jobs=row.jobs) for row in rows]
    )


def of_name(session: Session, name: str) -> SweepResponse:
    """A sweep of the caller's.

    Raises:
        NotFound: there is no such sweep, or its jobs were deleted.
    """
    jobs = session.scalars(select(Job).where(_name == name).order_by(Job.id).limit(MAX_JOBS)).all()
    if not jobs:
        raise NotFound(f"No sweep has the name {name}: GET …/sweeps lists yours.", field="name")
    return table(name, jobs)


def table(name: str, jobs: Any) -> SweepResponse:
    """The table of a sweep's jobs, which must not be empty."""
    rows = [_row(job) for job in jobs]
    best, decided_by = _best(rows)
    fields = dict.fromkeys(field for row in rows for field in row.values)
    return SweepResponse(
        name=name,
        created_at=int(min(job.created_at for job in jobs)),
        vary=list(fields),
        jobs=rows,
        best=best,
        decided_by=decided_by,
    )


def _row(job: Job) -> SweepJob:
    progress, result = job.progress or {}, job.result or {}
    return SweepJob(
        training_id=job.id,
        status=job.status,
        values=_values(job),
        step=progress.get("step") or 0,
        steps_total=progress.get("steps_total") or job.plan.get("steps_total"),
        loss=progress.get("loss_ema"),
        validation_loss=result.get("eval_loss"),
    )


def _values(job: Job) -> dict[str, Any]:
    """The values of the fields that vary; empty if a client has written the metadata itself."""
    try:
        found = json.loads(job.labels.get(VALUES_KEY, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _best(rows: list[SweepJob]) -> tuple[str | None, Literal["validation_loss", "loss"] | None]:
    """The succeeded job with the lowest validation loss; or, if none has one, the lowest training loss."""
    ended = [row for row in rows if row.status == "succeeded"]
    for by in ("validation_loss", "loss"):
        found = {row.training_id: getattr(row, by) for row in ended}
        known = {job: loss for job, loss in found.items() if loss is not None and isfinite(loss)}
        if known:
            return min(known, key=lambda job: known[job]), by
    return None, None
