"""Everything on a service, counted: jobs that do not run by what was kept of them, others by their steps."""

import json
from collections import Counter
from datetime import date
from typing import Any

from sqlalchemy import BindParameter, Connection, Integer, String, bindparam, cast, func, or_, select
from sqlalchemy.orm import Session

from app.database import insert_for
from app.models import Configuration, File, Job, JobTotals, Owned, StepMetric
from app.prepared import Prepared
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


def count(connection: Connection, owner: str | None) -> Totals:
    """Of everything that an owner sees; null: everybody's."""
    seen = {"owner": owner}
    sums = [row for query in (_ALL, _WHEN_RUNNING_BEGAN, _RUNNING) for row in query.run(connection, seen)]
    sums[1] = [-value for value in sums[1]]  # of what runs the steps themselves are counted
    by_model: Counter[str] = Counter()
    by_user: Counter[str] = Counter()
    for _, model, user, jobs in _LABELS.run(connection, seen):
        by_model[model] += jobs
        by_user[_label(connection, user)] += jobs
    by_status: dict[str, int] = dict(_STATES.run(connection, seen))
    return Totals(
        jobs=sum(by_status.values()),
        by_status=by_status,
        by_model=by_model,
        by_user=by_user,
        by_day={
            date.fromordinal(_EPOCH + int(day)).isoformat(): jobs
            for day, jobs in sorted(_DAYS.run(connection, seen))
        },
        configurations=_CONFIGURATIONS.run(connection, seen)[0][0],
        files=_FILES.run(connection, seen)[0][0],
        **{name: sum(map(int, values)) for name, *values in zip(_SUMS, *sums, strict=True)},
    )


def _label(connection: Connection, user: Any) -> str:
    """A `user_id` as people write it."""
    if isinstance(user, str) and connection.dialect.name == "sqlite":
        user = json.loads(user)
    return "" if user is None else str(user)


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)


def _seen(owned: type[Owned]) -> Any:
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    return or_(owner.is_(None), owned.owner == owner)


def _all(dialect: str) -> Any:
    """What was kept of every job."""
    mine = select(Job.id).where(_seen(Job))
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    kept = select(*(_sum(getattr(JobTotals, name)) for name in _SUMS))
    return kept.where(or_(owner.is_(None), JobTotals.job_id.in_(mine)))


def _when_running_began(dialect: str) -> Any:
    """What was kept of those that run now, when their last attempt ended."""
    running = select(Job.id).where(Job.status == "running", _seen(Job))
    return select(*(_sum(getattr(JobTotals, name)) for name in _SUMS)).where(JobTotals.job_id.in_(running))


def _running(dialect: str) -> Any:
    running = select(Job.id).where(Job.status == "running", _seen(Job))
    windows = (
        Job.progress["skipped"].as_integer()
        if dialect == "postgresql"
        else func.json_extract(Job.progress, "$.skipped")
    )
    skipped = select(_sum(windows)).where(Job.status == "running", _seen(Job))
    return select(
        func.count(), _sum(StepMetric.samples), _sum(StepMetric.tokens), skipped.scalar_subquery()
    ).where(StepMetric.job_id.in_(running))


def _labels(dialect: str) -> Any:
    """By model and user; grouped in the order of an index, which takes a fraction of the time."""
    labels = (Job.owner, Job.model_name, Job.user_id)
    return select(*labels, func.count()).where(_seen(Job)).group_by(*labels)


def _days(dialect: str) -> Any:
    """By day of submission, in days since 1970 in UTC."""
    days = Job.created_at / 86400.0
    day = cast(func.floor(days) if dialect == "postgresql" else days, Integer)  # where a cast rounds
    return select(day, func.count()).where(_seen(Job)).group_by(day)


def _how_many(owned: type[Owned]) -> Prepared:
    return Prepared(lambda dialect: select(func.count()).select_from(owned).where(_seen(owned)))


_ALL, _WHEN_RUNNING_BEGAN, _RUNNING = Prepared(_all), Prepared(_when_running_began), Prepared(_running)
_LABELS, _DAYS = Prepared(_labels), Prepared(_days)
_STATES = Prepared(lambda dialect: select(Job.status, func.count()).where(_seen(Job)).group_by(Job.status))
_CONFIGURATIONS, _FILES = _how_many(Configuration), _how_many(File)
