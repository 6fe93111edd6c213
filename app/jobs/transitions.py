"""A job's states, every edge between them, and the one way to change a job's row (but for its creation in
lifecycle.py, its claim in queue.py, and the note in preemption.py that room is being made for it).

    queued ──claim──► running ──► succeeded | failed | cancelled
      ▲ │               │
      │ ├─► cancelled   ├─ release, reclaim ──► queued   (an interruption is not a failure)
      │ └─► paused ◄────┘ pause
      │       │ └─► cancelled
      └───────┘ resume

A terminal state never changes, with one exception: a user may resume a job that timed out, which leads from
failed to queued. Pausing, cancelling and stopping a running job are requests that its worker carries out.
Every write by a worker carries the worker's fence (job, attempt, worker): if the fence no longer matches,
nothing is written and `LostJob` is raised. Users' transitions are in lifecycle.py, workers' in queue.py. The
caller owns the transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, update

from app.contract.states import JobStatus, RequestedAction
from app.errors import NotFound
from app.storage.session import Session
from app.storage.tables import Job

EDGES: Mapping[JobStatus, frozenset[JobStatus]] = {
    "queued": frozenset({"running", "paused", "cancelled"}),
    "paused": frozenset({"queued", "cancelled"}),
    "running": frozenset({"queued", "paused", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),  # a job that timed out, resumed by a person
    "cancelled": frozenset(),
}
"""The states that may follow each state."""


class LostJob(Exception):
    """The job has a newer attempt, another worker, or another state."""


@dataclass(frozen=True)
class Fence:
    """The fencing token that a worker must present with every write about a job."""

    job_id: str
    attempt: int
    worker_id: str


def get(session: Session, job_id: str, *, lock: bool = False) -> Job:
    """Returns a job.

    Args:
        lock: returns it as it is now, even if the session has read it before; no other transaction can change
            it until this one ends.

    Raises:
        NotFound: no job has that id.
    """
    job = session.get(Job, job_id, with_for_update=lock or None, populate_existing=lock)
    if job is None:
        raise NotFound(
            f"No job has the id {job_id}: GET /gradient-accumulation/training, or accrue jobs, lists them."
        )
    return job


def change(
    session: Session, where: Fence | Job, to: JobStatus | None = None, **values: Any
) -> RequestedAction | None:
    """Writes a job's row, and moves the job along an edge.

    A claim has its own statement (queue.py), since it also selects the row, and so has the note in
    preemption.py that room is being made for a job.

    Args:
        where: a worker's fence, or a job that this session has locked.
        to: the new state; None: the same.
        values: other columns.

    Returns:
        The action that a user has requested for the job, or None.

    Raises:
        LostJob: the job is no longer this worker's, or its state does not allow the transition.
    """
    condition = held_by(where) if isinstance(where, Fence) else Job.id == where.id
    if to is not None:
        condition = and_(condition, Job.status.in_([state for state, after in EDGES.items() if to in after]))
        values["status"] = to
    row = session.execute(
        update(Job)
        .where(condition)
        .values(**values)
        .returning(Job.requested)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if row is None:
        raise LostJob(where.job_id if isinstance(where, Fence) else where.id)
    if isinstance(where, Job):
        session.refresh(where)
    requested: RequestedAction | None = row.requested
    return requested


def held_by(fence: Fence) -> ColumnElement[bool]:
    """The condition that a fence's job still runs under that attempt and worker."""
    return and_(
        Job.id == fence.job_id,
        Job.attempt == fence.attempt,
        Job.worker_id == fence.worker_id,
        Job.status == "running",
    )
