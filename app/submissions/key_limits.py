"""The limits of a key: its waiting jobs, and its hours on devices."""

from app.errors import QuotaExceeded
from app.jobs import lifecycle, queue, transitions
from app.settings import Settings
from app.storage.database import lock_until_commit
from app.storage.session import Session
from app.storage.tables import Job
from app.usage import quotas

_LOCK_DISTANCE = 200
"""This close to the limit, submissions on PostgreSQL take a lock and are counted one at a time. Further away,
no lock is needed: fewer requests than this run at the same time, so together they cannot exceed the limit."""


def resume_within_limits(session: Session, job_id: str, settings: Settings) -> Job:
    """Resumes a job as `lifecycle.resume` does; a timed-out job counts toward its owner's limit of
    waiting jobs again."""
    job, most = transitions.get(session, job_id), settings.max_queued_jobs
    if lifecycle.timed_out(job):
        lock_until_commit(session, f"waiting jobs of {job.owner}")
        if queue.count_waiting(session, job.owner, most) >= most:
            raise _too_many(most)
    return lifecycle.resume(session, job_id)


def check_before_planning(session: Session, settings: Settings) -> None:
    """Checks that the key may submit any job at all, since planning one takes much longer than this.

    Raises:
        QuotaExceeded: the key has reached its limit of waiting jobs, or has used up its device hours.
    """
    maker, most = session.viewer.creator, settings.max_queued_jobs
    quotas.check(session, maker)
    if queue.count_waiting(session, maker, most) >= most:
        raise _too_many(most)


def check_limits(session: Session, settings: Settings, jobs: int = 1) -> None:
    """Checks that the key may submit `jobs` more jobs.

    Raises:
        QuotaExceeded: the key would exceed its limit of waiting jobs, or has used up its device hours.
    """
    quotas.check(session, session.viewer.creator)
    most = settings.max_queued_jobs
    waiting = _count_waiting(session, most)
    # Several jobs at once are rare, and few such requests could exceed the distance together.
    if (jobs > 1 or waiting > most - _LOCK_DISTANCE) and lock_until_commit(
        session, f"waiting jobs of {session.viewer.creator}"
    ):
        waiting = queue.count_waiting(session, session.viewer.creator, most)
    if waiting + jobs > most:
        raise _too_many(most, jobs)


def _too_many(most: int, jobs: int = 1) -> QuotaExceeded:
    if jobs > 1:
        return QuotaExceeded(
            f"With these {jobs} jobs, more than {most} would be queued or paused, which is the limit per key "
            "(ACCRUE_MAX_QUEUED_JOBS): try again with fewer, or once some have started."
        )
    return QuotaExceeded(
        f"{most} jobs are queued or paused already, which is the limit per key "
        "(ACCRUE_MAX_QUEUED_JOBS): try again once some have started, or cancel some."
    )


def _count_waiting(session: Session, most: int) -> int:
    """The number of the key's waiting jobs, or an upper bound of it that is below `most`."""
    maker, transaction = session.viewer.creator, session.shared_transaction
    if transaction is None:
        return queue.count_waiting(session, maker, most)
    known: dict[str | None, int] = transaction.known.setdefault("waiting", {})
    at_most = known[maker] + 1 if maker in known else most
    known[maker] = at_most if at_most < most else queue.count_waiting(session, maker, most)
    return known[maker]
