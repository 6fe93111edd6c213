"""Everything on a service, counted: jobs that do not run by what was kept of them, others by their steps."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from functools import partial
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Integer,
    String,
    and_,
    bindparam,
    cast,
    func,
    or_,
    select,
)

from app.statistics.schemas import Totals
from app.storage.compiled import Prepared
from app.storage.database import insert_for
from app.storage.session import Session
from app.storage.tables import Attempt, Configuration, File, Job, JobTotals, Owned, StepMetric

_EPOCH = date(1970, 1, 1).toordinal()
_SUMS = ("steps", "samples", "tokens", "skipped", "seconds", "device_seconds")
_SECONDS = (
    StepMetric.data_seconds
    + StepMetric.forward_backward_seconds
    + StepMetric.optimizer_seconds
    + func.coalesce(StepMetric.synchronise_seconds, 0.0)
)

Filters = Sequence[ColumnElement[bool]]
"""Conditions on jobs."""


def keep(session: Session, job_id: str) -> None:
    """Counts the steps of a job at the end of an attempt."""
    skipped = func.coalesce(func.max(Job.progress["skipped"].as_integer()), 0)
    attempts = select(_sum(Attempt.ended_at - Attempt.claimed_at)).where(Attempt.job_id == job_id)
    last = select(StepMetric.loss).where(StepMetric.job_id == job_id)
    last = last.order_by(StepMetric.step.desc()).limit(1)
    counted = (
        select(
            Job.id, func.count(StepMetric.step), _sum(StepMetric.samples), _sum(StepMetric.tokens), skipped,
            _sum(_SECONDS), attempts.scalar_subquery(), last.scalar_subquery(),
        )
        .outerjoin(StepMetric, StepMetric.job_id == Job.id)
        .where(Job.id == job_id)
        .group_by(Job.id)
    )  # fmt: skip
    columns = [*_SUMS, "final_loss"]
    statement = insert_for(session, JobTotals).from_select(["job_id", *columns], counted)
    new = {name: statement.excluded[name] for name in columns}
    session.execute(statement.on_conflict_do_update(index_elements=["job_id"], set_=new))


def count(connection: Connection, owner: str | None, filters: Filters = ()) -> Totals:
    """Of everything that an owner sees; null: everybody's.

    Args:
        filters: jobs are counted that fulfil all of them; configurations and files are not filtered.
    """
    requested = _queries(filters) if filters else _OF_EVERYTHING
    seen = {"owner": owner}
    ended, began, running = (
        query.run(connection, seen)[0] for query in (requested.all, requested.began, requested.running)
    )
    steps, samples, tokens, skipped, seconds, device_seconds = (
        float(kept - before + now) for kept, before, now in zip(ended, began, running, strict=True)
    )  # of what runs the steps themselves are counted
    by_model: Counter[str] = Counter()
    by_user: Counter[str] = Counter()
    for _, model, user, jobs in requested.labels.run(connection, seen):
        by_model[model] += jobs
        by_user[_label(connection, user)] += jobs
    by_status: dict[str, int] = dict(requested.states.run(connection, seen))
    return Totals(
        jobs=sum(by_status.values()),
        by_status=by_status,
        by_model=by_model,
        by_user=by_user,
        by_day={
            date.fromordinal(_EPOCH + int(day)).isoformat(): jobs
            for day, jobs in sorted(requested.days.run(connection, seen))
        },
        steps=int(steps),
        samples=int(samples),
        tokens=int(tokens),
        skipped=int(skipped),
        final_loss=requested.loss.run(connection, seen)[0][0],
        tokens_per_second=tokens / seconds if seconds else None,
        samples_per_second=samples / seconds if seconds else None,
        device_hours=device_seconds / 3600,
        configurations=_CONFIGURATIONS.run(connection, seen)[0][0],
        files=_FILES.run(connection, seen)[0][0],
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


def _all(filters: Filters, dialect: str) -> Any:
    """What was kept of every job."""
    mine = select(Job.id).where(_seen(Job), *filters)
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    kept = select(*(_sum(getattr(JobTotals, name)) for name in _SUMS))
    chosen = JobTotals.job_id.in_(mine)
    return kept.where(chosen if filters else or_(owner.is_(None), chosen))


def _loss(filters: Filters, dialect: str) -> Any:
    mine = select(Job.id).where(_seen(Job), *filters)
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    chosen = JobTotals.job_id.in_(mine)
    return select(func.avg(JobTotals.final_loss)).where(chosen if filters else or_(owner.is_(None), chosen))


def _when_running_began(filters: Filters, dialect: str) -> Any:
    """What was kept of those that run now, when their last attempt ended."""
    running = select(Job.id).where(_runs(filters))
    return select(*(_sum(getattr(JobTotals, name)) for name in _SUMS)).where(JobTotals.job_id.in_(running))


def _running(filters: Filters, dialect: str) -> Any:
    running = select(Job.id).where(_runs(filters))
    windows = (
        Job.progress["skipped"].as_integer()
        if dialect == "postgresql"
        else func.json_extract(Job.progress, "$.skipped")
    )
    skipped = select(_sum(windows)).where(_runs(filters))
    attempts = select(_sum(Attempt.ended_at - Attempt.claimed_at)).where(Attempt.job_id.in_(running))
    return select(
        func.count(), _sum(StepMetric.samples), _sum(StepMetric.tokens), skipped.scalar_subquery(),
        _sum(_SECONDS), attempts.scalar_subquery(),
    ).where(StepMetric.job_id.in_(running))  # fmt: skip


def _runs(filters: Filters) -> Any:
    return and_(Job.status == "running", _seen(Job), *filters)


def _labels(filters: Filters, dialect: str) -> Any:
    """By model and user; grouped in the order of an index, which takes a fraction of the time."""
    labels = (Job.owner, Job.model_name, Job.user_id)
    return select(*labels, func.count()).where(_seen(Job), *filters).group_by(*labels)


def _days(filters: Filters, dialect: str) -> Any:
    """By day of submission, in days since 1970 in UTC."""
    days = Job.created_at / 86400.0
    day = cast(func.floor(days) if dialect == "postgresql" else days, Integer)  # where a cast rounds
    return select(day, func.count()).where(_seen(Job), *filters).group_by(day)


def _states(filters: Filters, dialect: str) -> Any:
    return select(Job.status, func.count()).where(_seen(Job), *filters).group_by(Job.status)


def _how_many(owned: type[Owned]) -> Prepared:
    return Prepared(lambda dialect: select(func.count()).select_from(owned).where(_seen(owned)))


@dataclass(frozen=True)
class _Queries:
    """What totals are put together from."""

    all: Prepared
    began: Prepared
    running: Prepared
    loss: Prepared
    labels: Prepared
    days: Prepared
    states: Prepared


_MADE_BY: dict[str, Callable[[Filters, str], Any]] = {
    "all": _all,
    "began": _when_running_began,
    "running": _running,
    "loss": _loss,
    "labels": _labels,
    "days": _days,
    "states": _states,
}


def _queries(filters: Filters) -> _Queries:
    return _Queries(
        **{field.name: Prepared(partial(_MADE_BY[field.name], filters)) for field in fields(_Queries)}
    )


_OF_EVERYTHING = _queries(())
_CONFIGURATIONS, _FILES = _how_many(Configuration), _how_many(File)
