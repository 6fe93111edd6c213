"""Totals of a service. Running jobs are counted from their steps, all others from stored sums."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Select, case, cast, func, select

from app.statistics.schemas import GroupTotals, GroupWord, Totals
from app.storage.database import database_now, insert_for
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


def store_totals(session: Session, job_id: str) -> None:
    """Stores a job's totals at the end of an attempt."""
    skipped = func.coalesce(func.max(Job.progress["skipped"].as_integer()), 0)
    seconds = device_seconds(is_postgresql=session.get_bind().dialect.name == "postgresql")
    attempts = select(_sum(seconds)).where(Attempt.job_id == job_id)
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


def count(
    connection: Connection, owner: str | None, filters: Filters = (), by: GroupWord | None = None
) -> Totals:
    """Counts everything that an owner sees.

    Args:
        owner: the id of an API key, or None for all keys.
        filters: only jobs that fulfil all of them are counted; configurations and files are not filtered.
        by: also count the jobs of each day, user, model or device separately.
    """
    jobs = [*_seen(Job, owner), *filters]
    sums = _sums(connection, jobs)
    by_model: Counter[str] = Counter()
    by_user: Counter[str] = Counter()
    # Grouped in the order of an index, which takes a fraction of the time.
    for _, model, user, number in _numbers(connection, jobs, Job.owner, Job.model_name, Job.user_id):
        by_model[model] += number
        by_user["" if user is None else str(user)] += number
    by_status: dict[str, int] = dict(_numbers(connection, jobs, Job.status))
    return Totals(
        jobs=sum(by_status.values()),
        by_status=by_status,
        by_model=by_model,
        by_user=by_user,
        by_day=_by_day(connection, jobs),
        final_loss=_mean_final_loss(connection, jobs),
        **_figures(sums),
        configurations=_number(connection, Configuration, owner),
        files=_number(connection, File, owner),
        groups=None if by is None else count_groups(connection, jobs, by),
    )


@dataclass
class _Group:
    """What is summed over the jobs of a group."""

    by_status: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    final_losses: float = 0.0
    jobs_with_final_loss: int = 0


def count_groups(connection: Connection, jobs: Filters, by: GroupWord) -> list[GroupTotals]:
    """Counts the jobs that fulfil all conditions by day, user, model or device: days in order of time, other
    groups with the most device hours first."""
    key: Any = {
        "day": _day(connection), "user": Job.user_id, "model": Job.model_name, "device": Job.device
    }[by]  # fmt: skip
    groups: dict[str | None, _Group] = {}

    def group_of(value: Any) -> _Group:
        name = None if value is None else _date(value) if by == "day" else str(value)
        return groups.setdefault(name, _Group())

    ended = (_sum(case((Job.status == "running", 0), else_=getattr(JobTotals, name))) for name in _SUMS)
    stored = select(
        key, Job.status, func.count(), _sum(JobTotals.final_loss), func.count(JobTotals.final_loss), *ended
    )
    stored = stored.outerjoin(JobTotals, JobTotals.job_id == Job.id).where(*jobs).group_by(key, Job.status)
    for value, status, number, losses, with_loss, *sums in connection.execute(stored):
        group = group_of(value)
        group.by_status[status] += number
        group.final_losses += losses
        group.jobs_with_final_loss += with_loss
        group.sums.update(dict(zip(_SUMS, map(float, sums), strict=True)))
    for value, counted_steps in _running_by(connection, [*jobs, Job.status == "running"], key):
        group_of(value).sums.update(counted_steps)
    counted = [_totals_of_group(name, group) for name, group in groups.items()]
    if by == "day":
        return sorted(counted, key=lambda group: group.group or "")
    return sorted(counted, key=lambda group: (-group.device_hours, -group.jobs, group.group or ""))


def _running_by(
    connection: Connection, running: Filters, key: ColumnElement[Any]
) -> Iterator[tuple[Any, dict[str, float]]]:
    """The sums of running jobs, counted from their steps, one group and some of its sums at a time."""
    postgresql = connection.dialect.name == "postgresql"
    steps = (func.count(), _sum(StepMetric.samples), _sum(StepMetric.tokens), _sum(_SECONDS))
    counted: dict[tuple[str, ...], Select[Any]] = {
        ("steps", "samples", "tokens", "seconds"): (
            select(key, *steps).join_from(StepMetric, Job, StepMetric.job_id == Job.id)
        ),
        ("device_seconds",): (
            select(key, _sum(device_seconds(is_postgresql=postgresql)))
            .join_from(Attempt, Job, Attempt.job_id == Job.id)
        ),
        ("skipped",): select(key, _sum(_skipped(is_postgresql=postgresql))),
    }  # fmt: skip
    for names, query in counted.items():
        for value, *sums in connection.execute(query.where(*running).group_by(key)):
            yield value, dict(zip(names, map(float, sums), strict=True))


def _totals_of_group(name: str | None, group: _Group) -> GroupTotals:
    by_status = group.by_status
    ended = by_status["succeeded"] + by_status["failed"]
    return GroupTotals(
        group=name,
        jobs=by_status.total(),
        by_status={status: number for status, number in by_status.items() if number},
        success_rate=by_status["succeeded"] / ended if ended else None,
        final_loss=group.final_losses / group.jobs_with_final_loss if group.jobs_with_final_loss else None,
        **_figures(group.sums),
    )


def _figures(sums: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a response, from the sums of `_SUMS`."""
    seconds = sums["seconds"]
    return {
        **{name: int(sums[name]) for name in ("steps", "samples", "tokens", "skipped")},
        "target_tokens_per_second": sums["tokens"] / seconds if seconds else None,
        "samples_per_second": sums["samples"] / seconds if seconds else None,
        "device_hours": sums["device_seconds"] / 3600,
    }


def _sums(connection: Connection, jobs: Filters) -> dict[str, float]:
    """Sums over all jobs: running jobs are counted from their steps, others from their stored totals."""
    running = [*jobs, Job.status == "running"]
    kept = connection.execute(_kept(jobs)).one()
    before = connection.execute(_kept(running)).one()
    now = connection.execute(_of_steps(connection, running)).one()
    return {name: float(kept[i] - before[i] + now[i]) for i, name in enumerate(_SUMS)}


def _kept(jobs: Filters) -> Select[Any]:
    """The totals that jobs stored at the end of their last attempts."""
    sums = select(*(_sum(getattr(JobTotals, name)) for name in _SUMS))
    return sums.where(*_is_of(jobs))


def _of_steps(connection: Connection, running: Filters) -> Select[Any]:
    """The same sums for jobs that run, counted from their steps."""
    postgresql = connection.dialect.name == "postgresql"
    ids = select(Job.id).where(*running)
    skipped = select(_sum(_skipped(is_postgresql=postgresql))).where(*running)
    attempts = select(_sum(device_seconds(is_postgresql=postgresql))).where(Attempt.job_id.in_(ids))
    return select(
        func.count(), _sum(StepMetric.samples), _sum(StepMetric.tokens), skipped.scalar_subquery(),
        _sum(_SECONDS), attempts.scalar_subquery(),
    ).where(StepMetric.job_id.in_(ids))  # fmt: skip


def _skipped(*, is_postgresql: bool) -> ColumnElement[Any]:
    """The number of windows that a running job has skipped."""
    if is_postgresql:
        skipped: ColumnElement[Any] = Job.progress["skipped"].as_integer()
        return skipped
    return func.json_extract(Job.progress, "$.skipped")


def device_seconds(*, is_postgresql: bool, running: bool = False) -> ColumnElement[Any]:
    """The seconds of an attempt, multiplied by its number of devices; 0 if the clock was set back meanwhile.

    Args:
        running: up to now, for attempts of jobs that are running (no longer than their leases: the worker of
            a job whose lease has expired is lost); otherwise, up to their end.
    """
    if is_postgresql:
        ranks = func.jsonb_array_length(Attempt.plan["ranks"])
    else:
        ranks = func.json_array_length(Attempt.plan, "$.ranks")
    now = database_now()
    ended_at = case((Job.lease_until < now, Job.lease_until), else_=now) if running else Attempt.ended_at
    seconds = case((ended_at < Attempt.claimed_at, 0.0), else_=ended_at - Attempt.claimed_at)
    return seconds * func.coalesce(ranks, 1)


def _mean_final_loss(connection: Connection, jobs: Filters) -> float | None:
    mean: float | None = connection.scalar(select(func.avg(JobTotals.final_loss)).where(*_is_of(jobs)))
    return mean


def _by_day(connection: Connection, jobs: Filters) -> dict[str, int]:
    """The number of jobs submitted on each day, in UTC."""
    return {_date(day): number for day, number in sorted(_numbers(connection, jobs, _day(connection)))}


def _day(connection: Connection) -> ColumnElement[int]:
    """The day on which a job was submitted, in UTC: the number of days since 1970."""
    days: ColumnElement[float] = Job.created_at / 86400.0
    if connection.dialect.name == "postgresql":  # where a cast rounds
        days = func.floor(days)
    return cast(days, Integer)


def _date(day: int) -> str:
    return date.fromordinal(_EPOCH + int(day)).isoformat()


def _numbers(connection: Connection, jobs: Filters, *groups: Any) -> Sequence[Any]:
    """The number of jobs of each group: rows of the groups' columns and the number."""
    return connection.execute(select(*groups, func.count()).where(*jobs).group_by(*groups)).all()


def _number(connection: Connection, owned: type[Owned], owner: str | None) -> int:
    number = select(func.count()).select_from(owned).where(*_seen(owned, owner))
    return connection.execute(number).scalar_one()


def _is_of(jobs: Filters) -> Filters:
    """Conditions on rows of `JobTotals`."""
    return [JobTotals.job_id.in_(select(Job.id).where(*jobs))] if jobs else []


def _seen(owned: type[Owned], owner: str | None) -> Filters:
    return [] if owner is None else [owned.owner == owner]


def _sum(column: Any) -> Any:
    return func.coalesce(func.sum(column), 0)
