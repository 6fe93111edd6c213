"""A sweep's jobs side by side, and which is the best. Jobs belong to a sweep by their metadata."""

import json
import re
from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, literal, select

from app.contract.text import path_to_unstorable
from app.errors import NotFound
from app.jobs.filters import metadata_value
from app.results.comparability import why_not_comparable
from app.results.mean_losses import means_of_last
from app.storage.session import Session
from app.storage.tables import Job
from app.sweeps.schemas import NAME, SweepJob, SweepList, SweepResponse, SweepSummary
from app.sweeps.variations import NAME_KEY, VALUES_KEY

_MAX_LISTED = 100
_MAX_READ = 1000
"""The most jobs of one sweep that are read; each retry of a job is one more."""

_name = metadata_value(Job.client_metadata, literal(NAME_KEY))
_values_text = metadata_value(Job.client_metadata, literal(VALUES_KEY))
_NAME = re.compile(NAME)


def exists(session: Session, name: str) -> bool:
    """Whether the caller has created a sweep of that name."""
    own = _of_owner(session.viewer.creator)
    return (
        session.scalar(select(Job.id).where(_name == name, _values_text.is_not(None), own).limit(1))
        is not None
    )


def newest(session: Session) -> SweepList:
    """The newest sweeps that the caller may see."""
    began, count = func.min(Job.created_at), func.count(_values_text.distinct())
    query = select(_name.label("name"), began.label("created_at"), count.label("jobs"))
    query = query.where(_name.is_not(None), _values_text.is_not(None)).group_by(Job.owner, _name)
    rows = session.execute(query.order_by(func.max(Job.id).desc()).limit(_MAX_LISTED)).all()
    return SweepList(
        data=[
            SweepSummary(name=row.name, created_at=int(row.created_at), jobs=row.jobs)
            for row in rows
            if _NAME.fullmatch(row.name)
        ]
    )


def of_name(session: Session, name: str) -> SweepResponse:
    """A sweep: the caller's own or, for an administrator, the newest one of that name.

    Raises:
        NotFound: there is no such sweep, or its jobs were deleted.
    """
    named = select(Job).where(_name == name, _values_text.is_not(None)).order_by(Job.id.desc())
    jobs = session.scalars(named.where(_of_owner(session.viewer.creator)).limit(_MAX_READ)).all()
    if not jobs:
        newest_one = session.scalar(named.limit(1))
        if newest_one is None:
            where = "GET /gradient-accumulation/sweeps, or accrue sweeps, lists them"
            raise NotFound(f"No sweep has the name {name}: {where}.", field="name")
        jobs = session.scalars(named.where(_of_owner(newest_one.owner)).limit(_MAX_READ)).all()
    return table(session, name, jobs[::-1])


def _of_owner(owner: str | None) -> ColumnElement[bool]:
    return Job.owner.is_not_distinct_from(owner)


def table(session: Session, name: str, jobs: Sequence[Job]) -> SweepResponse:
    """The table of a sweep's jobs.

    Args:
        jobs: in the order of their creation; at least one. If a job was trained again, the newest job with
            the same values counts.
    """
    by_values = {job.client_metadata[VALUES_KEY]: job for job in jobs}
    counted = list(by_values.values())
    losses = means_of_last(session, counted)
    rows = [_row(job, losses.get(job.id)) for job in counted]
    best, decided_by, why_no_best = _best(rows, counted)
    return SweepResponse(
        name=name,
        created_at=int(min(job.created_at for job in jobs)),
        vary=list(dict.fromkeys(field for row in rows for field in row.values)),
        jobs=rows,
        best=best,
        decided_by=decided_by,
        why_no_best=why_no_best,
    )


def _row(job: Job, loss: float | None) -> SweepJob:
    progress, result = job.progress or {}, job.result or {}
    return SweepJob(
        training_id=job.id,
        status=job.status,
        values=_values(job),
        step=progress.get("step") or 0,
        steps_total=progress.get("steps_total") or job.plan.get("steps_total"),
        loss=progress.get("loss_ema") if loss is None else loss,
        validation_loss=result.get("eval_loss"),
    )


def _values(job: Job) -> dict[str, Any]:
    """The values of the fields that vary; empty if a client has written other metadata itself."""
    try:
        found = json.loads(job.client_metadata[VALUES_KEY])
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and path_to_unstorable(found) is None else {}


def _best(
    rows: Sequence[SweepJob], jobs: Sequence[Job]
) -> tuple[str | None, Literal["validation_loss", "loss"] | None, str | None]:
    """The succeeded job with the lowest validation loss; or, if no job has validation data, the lowest
    training loss. None if the losses of the jobs cannot be compared, with the reason."""
    has_validation = jobs[0].spec["data"]["validation"] is not None
    if (why := why_not_comparable(jobs, by_validation=has_validation)) is not None:
        return None, None, why
    by: Literal["validation_loss", "loss"] = "validation_loss" if has_validation else "loss"
    found = {row.training_id: getattr(row, by) for row in rows if row.status == "succeeded"}
    known = {job: loss for job, loss in found.items() if loss is not None and isfinite(loss)}
    return (min(known, key=lambda job: known[job]), by, None) if known else (None, None, None)
