"""Quotas of keys: hours on devices in a calendar month (UTC).

A key that has used up its quota submits no more jobs, and its queued jobs wait for the next month, or for a
larger quota. Jobs that run go on.
"""

from datetime import date, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Integer, and_, cast, func, literal_column, select

from app.errors import NotFound, QuotaExceeded
from app.statistics.totals import device_seconds
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Attempt, Job, Key, Usage
from app.usage.records import SECONDS_OF_DAY, month_of, number_of, running_seconds

_HOUR = 3600.0
_JULIAN_DAY_OF_1970 = 2440587.5


class Quota(NamedTuple):
    """A key's quota in the current month."""

    key_id: str
    name: str
    hours: float
    used_hours: float
    """Of ended attempts, and of running ones so far."""
    renews: date
    """The first day of the next month."""

    @property
    def is_used_up(self) -> bool:
        return self.used_hours >= self.hours


def all_quotas(session: Session, key_id: str | None = None) -> list[Quota]:
    """The quotas of keys that have one.

    Args:
        key_id: only this key's.
    """
    limited = select(Key.id, Key.name, Key.device_hours).where(Key.device_hours.is_not(None))
    if key_id is not None:
        limited = limited.where(Key.id == key_id)
    keys = session.execute(limited).all()
    if not keys:
        return []
    now = session.execute(select(database_now())).scalar_one()
    first, following = month_of(now)
    ids = [key for key, _, _ in keys]
    sums = (
        select(Usage.owner, func.sum(Usage.device_seconds))
        .where(
            Usage.owner.in_(ids),
            Usage.day.between(number_of(first), number_of(following - timedelta(days=1))),
        )
        .group_by(Usage.owner)
    )
    ended = {owner: float(seconds) for owner, seconds in session.execute(sums)}
    running = running_seconds(session, ids)
    return [
        Quota(
            key, name, float(hours or 0.0), (ended.get(key, 0.0) + running.get(key, 0.0)) / _HOUR, following
        )
        for key, name, hours in keys
    ]


def used_up(where: Session | Connection) -> tuple[str, ...]:
    """The ids of the keys that have used up their quota. Begins no transaction."""
    return tuple(key for (key,) in _USED_UP.run(where, {}))


def _used_up(dialect: str) -> Any:
    first, following = _days_of_month(dialect)
    ended = select(func.coalesce(func.sum(Usage.device_seconds), 0.0)).where(
        Usage.owner == Key.id, Usage.day >= first, Usage.day < following
    )
    seconds = device_seconds(is_postgresql=dialect == "postgresql", running=True)
    running = (
        select(func.coalesce(func.sum(seconds), 0.0))
        .select_from(Job)
        .join(Attempt, and_(Attempt.job_id == Job.id, Attempt.attempt == Job.attempt))
        .where(Job.status == "running", Job.owner == Key.id)
    )
    used = ended.correlate(Key).scalar_subquery() + running.correlate(Key).scalar_subquery()
    return select(Key.id).where(Key.device_hours.is_not(None), used >= Key.device_hours * _HOUR)


def _days_of_month(dialect: str) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """The first day of the current month in UTC, and that of the next month, as days since 1970."""
    if dialect == "postgresql":
        month = func.date_trunc("month", func.timezone("utc", func.now()))
        moments = month, month + literal_column("interval '1 month'")
        days = [cast(func.extract("epoch", each) / SECONDS_OF_DAY, Integer) for each in moments]
    else:
        starts = func.julianday("now", "start of month"), func.julianday("now", "start of month", "+1 month")
        days = [cast(each - _JULIAN_DAY_OF_1970, Integer) for each in starts]
    return days[0], days[1]


_USED_UP = CompiledStatement(_used_up)


def check(session: Session, key_id: str | None) -> None:
    """Checks that a key may submit a job.

    Raises:
        QuotaExceeded: it has used up its quota.
    """
    if key_id is None:
        return
    for quota in all_quotas(session, key_id):
        if quota.is_used_up:
            raise QuotaExceeded(
                f"This key has used {quota.used_hours:,.1f} of its {quota.hours:,g} device hours this month: "
                f"submit again from {quota.renews.isoformat()} (UTC), or ask the operator of this service "
                "for a larger quota (accrue keys set-quota)."
            )


def set_quota(session: Session, key_id: str, hours: float | None) -> Key:
    """Sets a key's device hours in a month; None: no limit.

    Raises:
        NotFound: no key has that id.
    """
    row = session.get(Key, key_id)
    if row is None:
        raise NotFound(f"No key has the id {key_id}: accrue keys list shows them.")
    row.device_hours = hours
    return row
