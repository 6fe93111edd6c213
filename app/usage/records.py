"""The time on devices of each key and day. It is kept when jobs are deleted.

An attempt counts on the day (in UTC) on which it ends: its seconds, multiplied by its number of devices.
"""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Integer, cast, func, literal, select

from app.statistics.totals import device_seconds
from app.storage.database import database_now, insert_for
from app.storage.session import Session
from app.storage.tables import Attempt, Job, Usage

NO_KEY = ""
"""The owner of jobs that were submitted without a key."""
SECONDS_OF_DAY = 86400
_EPOCH = date(1970, 1, 1).toordinal()


class UsageRow(NamedTuple):
    """What a key has used on a day."""

    owner: str
    day: date
    device_seconds: float
    attempts: int


def number_of(day: date) -> int:
    """A day as the database keeps it: days since 1970."""
    return day.toordinal() - _EPOCH


def record(session: Session, job_id: str, attempt: int) -> None:
    """Adds an attempt that has just ended to the usage of the job's owner."""
    is_postgresql = session.get_bind().dialect.name == "postgresql"
    day: ColumnElement[Any] = database_now() / SECONDS_OF_DAY
    if is_postgresql:  # where a cast rounds
        day = func.floor(day)
    ended = (
        select(
            func.coalesce(Job.owner, NO_KEY),
            cast(day, Integer),
            func.coalesce(device_seconds(is_postgresql=is_postgresql), 0.0),
            literal(1),
        )
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Job.id == job_id, Attempt.attempt == attempt, Attempt.ended_at.is_not(None))
    )
    columns = ["owner", "day", "device_seconds", "attempts"]
    statement = insert_for(session, Usage).from_select(columns, ended)
    added = {
        "device_seconds": Usage.device_seconds + statement.excluded.device_seconds,
        "attempts": Usage.attempts + statement.excluded.attempts,
    }
    session.execute(statement.on_conflict_do_update(index_elements=["owner", "day"], set_=added))


def between(session: Session, owner: str | None, first: date, last: date) -> list[UsageRow]:
    """The usage of each key and day, newest day first.

    Args:
        owner: the id of a key; None for all keys.
        first, last: both days are included.
    """
    query = select(Usage).where(Usage.day.between(number_of(first), number_of(last)))
    if owner is not None:
        query = query.where(Usage.owner == owner)
    rows = session.scalars(query.order_by(Usage.day.desc(), Usage.owner))
    return [
        UsageRow(row.owner, date.fromordinal(_EPOCH + row.day), row.device_seconds, row.attempts)
        for row in rows
    ]


def running_seconds(session: Session, owners: Sequence[str]) -> dict[str, float]:
    """The time on devices so far of the attempts that are running, by owner."""
    is_postgresql = session.get_bind().dialect.name == "postgresql"
    seconds = device_seconds(is_postgresql=is_postgresql, running=True)
    query = (
        select(Job.owner, func.sum(seconds))
        .join(Attempt, (Attempt.job_id == Job.id) & (Attempt.attempt == Job.attempt))
        .where(Job.status == "running", Job.owner.in_(owners))
        .group_by(Job.owner)
    )
    return {owner: float(total) for owner, total in session.execute(query) if owner is not None}


def by_owner(session: Session) -> dict[str, float]:
    """The seconds on devices of each owner's ended attempts, since the first."""
    sums = select(Usage.owner, func.sum(Usage.device_seconds)).group_by(Usage.owner)
    return {owner: float(seconds) for owner, seconds in session.execute(sums)}


def month_of(now: float) -> tuple[date, date]:
    """The first day of a moment's month in UTC, and that of the next month."""
    today = datetime.fromtimestamp(now, UTC).date()
    following = date(today.year + today.month // 12, today.month % 12 + 1, 1)
    return today.replace(day=1), following
