"""Why a job waits, and where it stands in the queue."""

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from sqlalchemy import BindParameter, Connection, and_, bindparam, case, func, or_, select
from sqlalchemy.orm import Session

from app.database import database_now
from app.models import Job, Worker
from app.prepared import Prepared
from app.schemas.training import Reason, Waiting
from app.workers_seen import SILENT_SECONDS


class _Workers(NamedTuple):
    now: float
    alive: int
    free: int
    """Devices of theirs on which nothing runs; negative: more runs than was seen of devices."""


class Outlook:
    """How waiting jobs stand at one moment; nothing is looked up where none waits."""

    def __init__(self, where: Session | Connection) -> None:
        self._where = where

    @cached_property
    def _workers(self) -> _Workers:
        ((now, alive, free),) = _WORKERS.run(self._where, {})
        return _Workers(float(now), alive, free or 0)

    def of(self, job: Job) -> Waiting | None:
        """Null: it does not wait."""
        if job.status != "queued":
            return None
        ((ahead,),) = _AHEAD.run(self._where, {"place": job.place, "id": job.id})
        later = job.not_before > self._workers.now
        return Waiting(
            reason=self._reason(later=later),
            queue_position=ahead + 1,
            predicted_start=int(job.not_before) + 1 if later else None,
        )

    def by_reason(self) -> dict[Reason, int]:
        """How many jobs wait for what; reasons that none waits for are left out."""
        counted: Counter[Reason] = Counter()
        for later, jobs in _BY_TIME.run(self._where, {}):
            counted[self._reason(later=bool(later))] += jobs
        return counted

    def _reason(self, *, later: bool) -> Reason:
        if not self._workers.alive:
            return "no_worker"
        if later:
            return "not_before"
        return "starting" if self._workers.free > 0 else "no_free_gpu"


def _ahead(dialect: str) -> object:
    """Everybody's jobs: their number is all that is told of them."""
    place: BindParameter[float] = bindparam("place")
    job_id: BindParameter[str] = bindparam("id")
    before = or_(Job.place < place, and_(Job.place == place, Job.id < job_id))
    return select(func.count()).select_from(Job).where(Job.status == "queued", before)


def _workers(dialect: str) -> object:
    length = func.jsonb_array_length if dialect == "postgresql" else func.json_array_length
    return select(
        database_now(), func.count(), func.sum(length(Worker.devices) - length(Worker.running))
    ).where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)


def _by_time(dialect: str) -> object:
    later = case((Job.not_before > database_now(), 1), else_=0)
    return select(later, func.count()).where(Job.status == "queued").group_by(later)


_AHEAD, _WORKERS, _BY_TIME = Prepared(_ahead), Prepared(_workers), Prepared(_by_time)
