"""Everything on a service, counted: jobs that do not run by what was kept of them, others by their steps."""

from collections import Counter
from datetime import date
from typing import Any

from sqlalchemy import Integer, cast, func, select
from sqlalchemy.orm import Session

from app.database import insert_for
from app.models import Configuration, File, Job, JobTotals, StepMetric
from app.schemas.statistics import Totals

_EPOCH = date(1970, 1, 1).toordinal()
_SUMS = ("steps", "samples", "tokens", "skipped")


def keep(session: Session, job_id: str) -> None:
    """Counts the steps of a job at the end of an attempt."""
    skipped = func.coalesce(func.max(Job.progress["skipped"].as_integer()), 0)
    counted = (
        select(
            Job.id, func.count(StepMetric.step), _sum(StepMetric.samples), _sum(StepMetric.tokens), skipped
        )
        .outerjoin(StepMetric, StepMetric.job_id == Job.id)
        .where(Job.id == job_id)
        .group_by(Job.id)
    )
    statement = insert_for(session, JobTotals).from_select(["job_id", *_SUMS], counted)
    new = {name: statement.excluded[name] for name in _SUMS}
    session.execute(statement.on_conflict_do_update(index_elements=["job_id"], set_=new))


def count(session: Session) -> Totals:
    """Of everything that the session sees."""
    kept, running = _kept(session), _of_running_jobs(session)
    rows = session.execute(select(Job.status, func.count()).group_by(Job.status))
    by_status = {row[0]: row[1] for row in rows}
    by_model: Counter[str] = Counter()
    by_user: Counter[str] = Counter()
    by_day: Counter[str] = Counter()
    day = _day(session)
    for model, user, number, jobs in session.execute(
        select(Job.model_name, Job.user_id, day, func.count())
        .group_by(Job.model_name, Job.user_id, day)
        .order_by(day)
    ):
        by_model[model] += jobs
        by_user["" if user is None else str(user)] += jobs
        by_day[date.fromordinal(_EPOCH + int(number)).isoformat()] += jobs
    return Totals(
        jobs=sum(by_status.values()),
        by_status=by_status,
        by_model=by_model,
        by_user=by_user,
        by_day=by_day,
        configurations=session.scalar(select(func.count()).select_from(Configuration)) or 0,
        files=session.scalar(select(func.count()).select_from(File)) or 0,
        **{name: kept[name] + running[name] for name in _SUMS},
    )


def _kept(session: Session) -> dict[str, int]:
    """The sums of the jobs that do not run."""
    sums = select(*(_sum(getattr(JobTotals, name)).label(name) for name in _SUMS))
    sums = sums.where(JobTotals.job_id.not_in(select(Job.id).where(Job.status == "running")))
    if session.info.get("owner") is not None:
        sums = sums.where(JobTotals.job_id.in_(select(Job.id)))
    return dict(session.execute(sums).one()._mapping)


def _of_running_jobs(session: Session) -> dict[str, int]:
    running = Job.status == "running"
    steps = (
        select(
            func.count().label("steps"),
            _sum(StepMetric.samples).label("samples"),
            _sum(StepMetric.tokens).label("tokens"),
        )
        .select_from(StepMetric)
        .where(StepMetric.job_id.in_(select(Job.id).where(running)))
    )
    skipped = select(_sum(Job.progress["skipped"].as_integer())).where(running)
    return {**session.execute(steps).one()._mapping, "skipped": session.scalar(skipped) or 0}


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)


def _day(session: Session) -> Any:
    """Of a job's submission, in days since 1970 in UTC."""
    days = Job.created_at / 86400.0
    if session.get_bind().dialect.name == "postgresql":
        return cast(func.floor(days), Integer)  # where a cast rounds
    return cast(days, Integer)
