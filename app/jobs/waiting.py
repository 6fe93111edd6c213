"""Why a job waits, and where it stands in the queue."""

import json
from collections import Counter
from functools import cached_property
from typing import NamedTuple

from sqlalchemy import BindParameter, Connection, String, and_, bindparam, case, cast, func, or_, select

from app.contract.worker_labels import meets
from app.devices.live_workers import SILENT_SECONDS
from app.jobs.queue import device_count_of_worker
from app.jobs.response_schemas import Reason, Waiting
from app.storage.compiled import CompiledStatement
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Job, Worker
from app.usage import quotas


class _Worker(NamedTuple):
    """A live worker."""

    labels: dict[str, str]
    free: int
    """Its idle devices."""
    devices: int


class _Position(NamedTuple):
    """A job's position in the queue, from which those of other jobs are counted."""

    place: float
    id: str
    ahead: int


class WaitingReasons:
    """Why jobs wait, and their queue positions, at one moment; needs no query if no job waits."""

    def __init__(self, where: Session | Connection) -> None:
        self._where = where
        self._mark: _Position | None = None

    @classmethod
    def within(cls, session: Session) -> "WaitingReasons":
        """The reasons in a session's transaction, computed once for all of its jobs."""
        transaction = session.shared_transaction
        if transaction is None:
            return cls(session)
        waiting_reasons: WaitingReasons = transaction.known.setdefault(
            "waiting_reasons", cls(transaction.connection)
        )
        return waiting_reasons

    @cached_property
    def _now_and_workers(self) -> tuple[float, list[_Worker]]:
        rows = _WORKERS.run(self._where, {})
        workers = [
            _Worker(json.loads(labels), free, own) for _, labels, free, own in rows if labels is not None
        ]
        return float(rows[0][0]), workers

    @cached_property
    def _used_up(self) -> frozenset[str]:
        """The keys whose device hours are used up."""
        return frozenset(quotas.used_up(self._where))

    def of(self, job: Job) -> Waiting | None:
        """Why a job waits and its queue position; None if it does not wait."""
        if job.status != "queued":
            return None
        self._mark = self._position_of(job)
        later = job.not_before > self._now_and_workers[0]
        reason = self._reason(later=later, devices=job.device_count, requirements=job.requirements)
        if reason in ("no_free_gpu", "starting") and job.owner in self._used_up:
            reason = "quota_used_up"
        return Waiting(
            reason=reason,
            queue_position=self._mark.ahead + 1,
            predicted_start=int(job.not_before) + 1 if later else None,
        )

    def _position_of(self, job: Job) -> _Position:
        """A job's queue position, counted from the previous job's: that reads fewer rows of a long queue."""
        own = {"place": job.place, "id": job.id}
        if self._mark is None:
            ((ahead,),) = _AHEAD.run(self._where, own)
            return _Position(job.place, job.id, ahead)
        last, reached = (self._mark.place, self._mark.id), (job.place, job.id)
        low, high = sorted((last, reached))
        between = {"low_place": low[0], "low_id": low[1], "place": high[0], "id": high[1]}
        ((jobs,),) = _BETWEEN.run(self._where, between)
        return _Position(*reached, self._mark.ahead + (jobs if reached > last else -jobs))

    def by_reason(self) -> dict[Reason, int]:
        """The number of waiting jobs by reason, as if each needed one device, and without regard to quotas;
        reasons without jobs are left out."""
        counted: Counter[Reason] = Counter()
        for later, requirements, jobs in _BY_TIME.run(self._where, {}):
            counted[self._reason(later=bool(later), requirements=requirements)] += jobs
        return counted

    def _reason(self, *, later: bool, devices: int = 1, requirements: str = "{}") -> Reason:
        _, workers = self._now_and_workers
        if not workers:
            return "no_worker"
        required = json.loads(requirements)
        matching = [worker for worker in workers if meets(worker.labels, required)]
        if not matching:
            return "no_matching_worker"
        if later:
            return "retry_delay"
        most = max(worker.devices for worker in matching)  # a job that requests more trains on these
        needed = max(1, min(devices, most))
        return "starting" if any(worker.free >= needed for worker in matching) else "no_free_gpu"


def _ahead(dialect: str) -> object:
    """Counts the queued jobs of all owners that are ahead of a position."""
    place: BindParameter[float] = bindparam("place")
    job_id: BindParameter[str] = bindparam("id")
    before = and_(Job.place <= place, or_(Job.place < place, Job.id < job_id))
    return select(func.count()).select_from(Job).where(Job.status == "queued", before)


def _between(dialect: str) -> object:
    """Counts the queued jobs from one position (inclusive) to another (exclusive)."""
    place: BindParameter[float] = bindparam("place")
    low_place: BindParameter[float] = bindparam("low_place")
    job_id: BindParameter[str] = bindparam("id")
    low_id: BindParameter[str] = bindparam("low_id")
    return (
        select(func.count())
        .select_from(Job)
        .where(
            Job.status == "queued",
            Job.place >= low_place,
            or_(Job.place > low_place, Job.id >= low_id),
            Job.place <= place,
            or_(Job.place < place, Job.id < job_id),
        )
    )


def _workers(dialect: str) -> object:
    """The time, and the live workers with labels, idle devices and devices; one row without these if there is
    no worker."""
    own = device_count_of_worker(dialect)
    used = select(func.coalesce(func.sum(Job.device_count), 0)).where(
        Job.status == "running", Job.worker_id == Worker.id
    )
    free = own - used.correlate(Worker).scalar_subquery()
    now = select(database_now().label("now")).subquery()
    return select(now.c.now, cast(Worker.labels, String), free, own).select_from(
        now.outerjoin(Worker, Worker.heartbeat_at > now.c.now - SILENT_SECONDS)
    )


def _by_time(dialect: str) -> object:
    later = case((Job.not_before > database_now(), 1), else_=0)
    columns = (later, Job.requirements)
    return select(*columns, func.count()).where(Job.status == "queued").group_by(*columns)


_AHEAD, _BETWEEN = CompiledStatement(_ahead), CompiledStatement(_between)
_WORKERS, _BY_TIME = CompiledStatement(_workers), CompiledStatement(_by_time)
