"""The queue against a model of it: three workers, and every kind of event in any order.

After every step: each acknowledged job exists, at most one worker holds it, an ended job has not changed,
and whoever does not hold a job writes nothing about it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, func, select, update

from app.contract.reports import Failure
from app.contract.states import ENDED
from app.errors import Conflict
from app.jobs import lifecycle, queue
from app.jobs.queue import MAX_FAILURES
from app.jobs.transitions import Fence, LostJob
from app.storage.database import Database, database_now
from app.storage.tables import Attempt, Job, JobEvent
from tests.harness.submissions import submitted

CRASH = Failure(code="trainer_killed", message="killed", permanent=False)
BROKEN = Failure(code="bad_data", message="no token to learn", permanent=True)
TOO_LONG = Failure(code=lifecycle.TIMEOUT, message="too long", permanent=True)
WORKERS = st.sampled_from(["worker-1", "worker-2", "worker-3"])


@dataclass
class Modelled:
    """A job as it should be."""

    status: str = "queued"
    attempt: int = 0
    holder: str | None = None
    requested: str | None = None
    failures: int = 0
    checkpoint: int = 0
    expired: bool = False
    timed_out: bool = False
    ended: dict[str, Any] = field(default_factory=dict)
    """The row when it ended."""


class Queue(RuleBasedStateMachine):
    """Its methods do a thing to both the database and the model."""

    database: ClassVar[Database]
    submissions = Bundle("submissions")
    fences = Bundle("fences")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, Modelled] = {}
        with self.database.writing() as session:
            for table in (JobEvent, Attempt, Job):
                session.execute(delete(table))

    @rule(target=submissions, paused=st.booleans(), priority=st.integers(-2, 2))
    def submit(self, paused: bool, priority: int) -> str:
        job_id = submitted(self.database, paused=paused, priority=priority)
        self.model[job_id] = Modelled(status="paused" if paused else "queued")
        return job_id

    @rule(target=fences, worker=WORKERS)
    def claim(self, worker: str) -> Any:
        with self.database.writing() as session:
            session.execute(update(Job).values(not_before=0.0))  # nobody waits out a crash here
            fence = queue.claim(session, worker, 500.0)
        waiting = [job_id for job_id, own in self.model.items() if own.status == "queued"]
        assert (fence is None) == (not waiting)
        if fence is None:
            return multiple()
        own = self.model[fence.job_id]
        assert own.status == "queued"
        assert fence.attempt == own.attempt + 1
        own.status, own.attempt, own.holder, own.expired = "running", fence.attempt, worker, False
        return fence

    @rule(fence=fences)
    def beat(self, fence: Fence) -> None:
        requested = self._by_holder(fence, lambda session: queue.renew_lease(session, fence, 500.0))
        if self._holds(fence):
            assert requested == self.model[fence.job_id].requested
            self.model[fence.job_id].expired = False

    @rule(fence=fences, step=st.integers(1, 5))
    def checkpoint(self, fence: Fence, step: int) -> None:
        self._by_holder(fence, lambda session: queue.note_progress(session, fence, {"step": step}, step))
        own = self.model[fence.job_id]
        if self._holds(fence) and step > own.checkpoint:
            own.checkpoint, own.failures = step, 0

    @rule(fence=fences)
    def succeed(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.succeed(session, fence, {"files": []}))
        self._ends(fence, "succeeded")

    @rule(fence=fences)
    def fail(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.fail(session, fence, BROKEN))
        self._fails(fence)

    @rule(fence=fences)
    def crash(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.crash(session, fence, CRASH))
        if not self._holds(fence):
            return
        own = self.model[fence.job_id]
        if own.failures + 1 >= MAX_FAILURES:
            self._fails(fence)
        else:
            own.failures += 1
            self._leaves(own)

    @rule(fence=fences)
    def release(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.release(session, fence, "shut down"))
        if self._holds(fence):
            self._leaves(self.model[fence.job_id])

    @rule(fence=fences)
    def postpone(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.postpone(session, fence, "no room", 60.0))
        if self._holds(fence):
            self._leaves(self.model[fence.job_id])

    @rule(job_id=submissions)
    def expire(self, job_id: str) -> None:
        """Its worker is stopped for longer than the lease."""
        with self.database.writing() as session:
            own = (Job.id == job_id) & (Job.status == "running")
            session.execute(update(Job).where(own).values(lease_until=database_now() - 1))
        if self.model[job_id].status == "running":
            self.model[job_id].expired = True

    @rule()
    def reclaim_expired(self) -> None:
        with self.database.writing() as session:
            rescued = set(queue.reclaim_expired(session))
        assert rescued == {job_id for job_id, own in self.model.items() if own.expired}
        self._rescued()

    @rule(job_id=submissions)
    def cancel(self, job_id: str) -> None:
        self._by_person(
            lambda session: lifecycle.cancel(session, job_id), job_id, refused=("succeeded", "failed")
        )
        own = self.model[job_id]
        if own.status == "running":
            own.requested = "cancel"
        elif own.status in ("queued", "paused"):
            own.status, own.requested = "cancelled", None

    @rule(job_id=submissions)
    def pause(self, job_id: str) -> None:
        own = self.model[job_id]
        cancelling = own.status == "running" and not own.expired and own.requested == "cancel"
        refused = ENDED if not cancelling else (*ENDED, "running")
        if own.requested == "stop":
            refused = (*ENDED, own.status)
        if own.expired and own.requested == "cancel":
            refused = (*refused, "cancelled")
        done = self._by_person(lambda session: lifecycle.pause(session, job_id), job_id, refused=refused)
        if done and own.status == "running":
            own.requested = "pause"
        elif done and own.status == "queued":
            own.status = "paused"

    @rule(job_id=submissions)
    def stop(self, job_id: str) -> None:
        own = self.model[job_id]
        nothing_learned = not own.checkpoint and (own.status != "running" or own.expired)
        refused = ENDED
        if nothing_learned or own.requested == "cancel":
            refused = (*ENDED, own.status)
        if own.expired:
            refused = (*refused, "cancelled")
        done = self._by_person(lambda session: lifecycle.stop(session, job_id), job_id, refused=refused)
        if done:
            own.status = "running" if own.status == "running" else "queued"
            own.requested = "stop"

    @rule(fence=fences)
    def time_out(self, fence: Fence) -> None:
        self._by_holder(fence, lambda session: queue.fail(session, fence, TOO_LONG))
        self.model[fence.job_id].timed_out |= self._holds(fence)
        self._fails(fence)

    @rule(job_id=submissions)
    def resume(self, job_id: str) -> None:
        own = self.model[job_id]
        refused = (*ENDED, *((own.status,) if own.requested in ("cancel", "stop") else ()))
        if own.timed_out:
            refused = ("succeeded", "cancelled")
        done = self._by_person(
            lambda session: lifecycle.resume(session, job_id), job_id, refused=refused, rescues=False
        )
        if done and own.timed_out:
            own.status, own.failures, own.timed_out, own.ended = "queued", 0, False, {}
        elif done and own.status == "paused":
            own.status = "queued"
        elif done and own.status == "running":
            own.requested = None

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        with self.database.reading() as session:
            rows = {job.id: job for job in session.scalars(select(Job))}
            attempts = session.scalar(select(func.count()).select_from(Attempt))
        assert set(rows) == set(self.model)
        assert attempts == sum(own.attempt for own in self.model.values())
        for job_id, own in self.model.items():
            row = rows[job_id]
            assert (row.status, row.attempt, row.requested) == (own.status, own.attempt, own.requested)
            assert row.worker_id == own.holder or row.status != "running"
            assert (row.lease_until is not None) == (own.status == "running")
            if own.status in ENDED:
                told = {
                    name: getattr(row, name)
                    for name in ("status", "attempt", "finished_at", "result", "error")
                }
                own.ended = own.ended or told
                assert told == own.ended
                assert row.finished_at is not None

    def _holds(self, fence: Fence) -> bool:
        own = self.model[fence.job_id]
        return (own.status, own.attempt, own.holder) == ("running", fence.attempt, fence.worker_id)

    def _by_holder(self, fence: Fence, action: Callable[[Any], Any]) -> Any:
        """Done by whoever holds the job; refused to everybody else, and nothing is written."""
        try:
            with self.database.writing() as session:
                done = action(session)
        except LostJob:
            assert not self._holds(fence)
            return None
        assert self._holds(fence)
        return done

    def _by_person(
        self, action: Callable[[Any], Any], job_id: str, *, refused: tuple[str, ...], rescues: bool = True
    ) -> bool:
        """A user's action, refused in the states `refused`; it first requeues jobs with expired leases."""
        own = self.model[job_id]
        try:
            with self.database.writing() as session:
                action(session)
        except Conflict:
            assert own.status in refused or (own.expired and "cancelled" in refused)
            return False
        if rescues:
            self._rescued()
        assert own.status not in refused
        return True

    def _rescued(self) -> None:
        for own in self.model.values():
            if own.expired:
                self._leaves(own)

    def _leaves(self, own: Modelled) -> None:
        own.status = {"cancel": "cancelled", "pause": "paused"}.get(own.requested or "", "queued")
        own.requested = "stop" if own.requested == "stop" else None
        own.holder, own.expired = None, False

    def _fails(self, fence: Fence) -> None:
        own = self.model[fence.job_id]
        if self._holds(fence) and own.requested == "cancel":
            self._leaves(own)
        else:
            self._ends(fence, "failed")

    def _ends(self, fence: Fence, status: str) -> None:
        own = self.model[fence.job_id]
        if self._holds(fence):
            own.status, own.requested, own.expired = status, None, False


@pytest.fixture
def machine(database: Database) -> type[Queue]:
    Queue.database = database
    return Queue


def test_the_queue_behaves_like_its_model(machine: type[Queue]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )  # fmt: skip
