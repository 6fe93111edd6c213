"""Fair share: of the keys with waiting jobs, the one that has used the least device time in
recent weeks goes first.

What counts is the time on devices of ended attempts, halved for each week since, and of running attempts so
far. Within a key, jobs start in the usual order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select

from app.statistics.totals import device_seconds
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Attempt, Job, Usage
from app.usage.records import NO_KEY, SECONDS_OF_DAY

HALF_LIFE_DAYS = 7.0
_FORGOTTEN_DAYS = 70
"""Usage that is older counts less than a thousandth."""


class WaitingKey(NamedTuple):
    """A key with waiting jobs."""

    owner: str
    place: float
    """The place of its first job in the queue."""


def recent_use(
    ended: Iterable[tuple[str, int, float]], running: Mapping[str, float], today: int
) -> dict[str, float]:
    """The seconds on devices that each key has used lately.

    Args:
        ended: owner, day and seconds of ended attempts; days are counted from 1970.
        running: the seconds of running attempts so far, by owner.
        today: the current day.
    """
    used: defaultdict[str, float] = defaultdict(float, running)
    for owner, day, seconds in ended:
        used[owner] += seconds * 0.5 ** (max(0, today - day) / HALF_LIFE_DAYS)
    return used


def in_turn(waiting: Iterable[WaitingKey], used: Mapping[str, float]) -> list[str]:
    """The keys in the order in which they may start a job; equal ones by the places of their first jobs.

    Args:
        used: what each key has used lately; keys that are left out have used nothing.
    """
    return [each.owner for each in sorted(waiting, key=lambda each: (used.get(each.owner, 0.0), each.place))]


def order(session: Session) -> list[str]:
    """The owners of queued jobs, in the order in which they may start one."""
    waiting = [WaitingKey(*row) for row in _WAITING.run(session, {})]
    if len(waiting) < 2:  # no other key waits
        return [each.owner for each in waiting]
    ((now,),) = _NOW.run(session, {})
    today = int(now // SECONDS_OF_DAY)
    ended = _ENDED.run(session, {"since": today - _FORGOTTEN_DAYS})
    return in_turn(waiting, recent_use(ended, dict(_RUNNING.run(session, {})), today))


def _waiting(dialect: str) -> Any:
    owner = func.coalesce(Job.owner, NO_KEY).label("key_id")
    may_start = (Job.status == "queued", Job.not_before <= database_now())
    return select(owner, func.min(Job.place)).where(*may_start).group_by(owner)


def _ended(dialect: str) -> Any:
    return select(Usage.owner, Usage.day, Usage.device_seconds).where(Usage.day >= bindparam("since"))


def _running(dialect: str) -> Any:
    owner = func.coalesce(Job.owner, NO_KEY).label("key_id")
    seconds = func.sum(device_seconds(is_postgresql=dialect == "postgresql", running=True))
    own = (Attempt.job_id == Job.id) & (Attempt.attempt == Job.attempt)
    return select(owner, seconds).join(Attempt, own).where(Job.status == "running").group_by(owner)


_WAITING, _ENDED, _RUNNING = (
    CompiledStatement(_waiting),
    CompiledStatement(_ended),
    CompiledStatement(_running),
)
_NOW = CompiledStatement(lambda dialect: select(database_now()))
