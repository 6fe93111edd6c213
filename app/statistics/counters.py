"""Counters that never decrease: summed over existing jobs, plus the stored share of deleted ones.

Prometheus takes a decrease for a restart of the service, and then computes wrong rates.
"""

from collections.abc import Iterator
from typing import Any, Literal

from sqlalchemy import BigInteger, cast, func, select

from app.storage.database import insert_for
from app.storage.session import Session
from app.storage.tables import Counter, Job, JobEvent

Name = Literal["job_seconds", "trained_tokens", "oom_recoveries"]
Counted = tuple[Name, str, float]
"""A figure, its label and its value."""


def count(session: Session) -> dict[tuple[Name, str], float]:
    """Every figure by its name and label."""
    found: dict[tuple[Name, str], float] = {}
    kept = session.execute(select(Counter.name, Counter.label, Counter.value))
    for name, label, value in (*_of_jobs(session), *kept):
        found[name, label] = found.get((name, label), 0.0) + float(value)
    return found


def add_to_stored(session: Session, job_id: str, *names: Name) -> None:
    """Adds a job's share to the stored counters, before the job is deleted or starts anew: all of it, or that
    of the counters named."""
    for name, label, value in _of_jobs(session, Job.id == job_id):
        if names and name not in names:
            continue
        statement = insert_for(session, Counter).values(name=name, label=label, value=value)
        more = Counter.__table__.c.value + statement.excluded.value
        session.execute(
            statement.on_conflict_do_update(index_elements=["name", "label"], set_={"value": more})
        )


def _of_jobs(session: Session, *which: Any) -> Iterator[Counted]:
    """Counts existing jobs: seconds from first claim to end by state, target tokens of those that succeeded,
    and how often a trainer ran out of memory."""
    ended = select(Job.status, func.sum(Job.finished_at - Job.started_at)).where(
        Job.finished_at.is_not(None), Job.started_at.is_not(None), *which
    )
    for status, seconds in session.execute(ended.group_by(Job.status)):
        yield "job_seconds", status, seconds or 0.0
    tokens = select(func.sum(cast(Job.result["trained_tokens"].as_string(), BigInteger))).where(
        Job.status == "succeeded", *which
    )
    yield "trained_tokens", "", session.scalar(tokens) or 0
    recoveries = select(func.count()).select_from(JobEvent).where(JobEvent.type == "out_of_memory")
    if which:
        recoveries = recoveries.where(JobEvent.job_id.in_(select(Job.id).where(*which)))
    yield "oom_recoveries", "", session.scalar(recoveries) or 0
