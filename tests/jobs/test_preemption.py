"""Which jobs make way: those with lower priorities, no more than necessary, and on one worker only."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from app.devices import live_workers
from app.jobs import preemption, queue
from app.jobs.preemption import Occupant, QueuedJob, Reserved, Room, WorkerView, room_for
from app.jobs.queue import AGEING_SECONDS, Offer
from app.jobs.reservations import DeviceId
from app.jobs.transitions import Fence
from app.storage.database import Database, database_now
from app.storage.tables import Job, Worker
from tests.harness.submissions import submitted


def waiting(
    priority: int = 5, devices: int = 1, gpu_ids: frozenset[int] = frozenset(), owner: str = ""
) -> QueuedJob:
    return QueuedJob("urgent", owner, priority, devices, gpu_ids)


def occupant(
    name: str, priority: int, *devices: int, claimed: float | None = None, owner: str = ""
) -> Occupant:
    own = priority if claimed is None else claimed
    return Occupant(name, owner, priority, own, frozenset(devices))


def leaving(
    own: QueuedJob, *occupants: Occupant, free: tuple[int, ...] = (), fairly: bool = False
) -> list[str] | None:
    room = room_for(own, occupants, frozenset(free), fairly=fairly)
    return None if room is None else list(room.leaving)


def test_the_lowest_priority_makes_way_first() -> None:
    jobs = [occupant("high", 4, 0), occupant("low", 1, 1), occupant("lower", 0, 2)]
    assert leaving(waiting(), *jobs) == ["lower"]
    assert leaving(waiting(devices=2), *jobs) == ["lower", "low"]
    assert leaving(waiting(devices=3), *jobs) == ["lower", "low", "high"]
    assert leaving(waiting(devices=4), *jobs) is None


def test_equal_priorities_do_not_make_way() -> None:
    assert leaving(waiting(5), occupant("same", 5, 0), occupant("higher", 6, 1)) is None


def test_a_job_that_was_preferred_for_its_age_keeps_its_devices() -> None:
    assert leaving(waiting(5), occupant("aged", 0, 0, claimed=5.5)) is None
    assert leaving(waiting(5), occupant("young", 0, 0, claimed=4.5)) == ["young"]


def test_free_devices_are_used_first_and_no_job_leaves_in_vain() -> None:
    jobs = [occupant("small", 0, 0), occupant("wide", 1, 1, 2, 3)]
    assert leaving(waiting(devices=2), *jobs, free=(4,)) == ["small"]
    assert leaving(waiting(devices=4), *jobs, free=(4,)) == ["wide"]
    assert leaving(waiting(), *jobs, free=(4,)) is None, "it can start now"


def test_a_job_gets_the_gpus_that_it_names() -> None:
    own = waiting(devices=2, gpu_ids=frozenset({1, 2}))
    room = room_for(own, [occupant("other", 0, 0), occupant("its", 1, 1)], frozenset([2]), fairly=False)
    assert room == Room("urgent", frozenset({1, 2}), ("its",))


def test_with_fair_share_only_jobs_of_the_same_key_make_way() -> None:
    jobs = [occupant("other", 0, 0, owner="key-2"), occupant("own", 1, 1, owner="key-1")]
    assert leaving(waiting(owner="key-1"), *jobs, fairly=True) == ["own"]
    assert leaving(waiting(owner="key-1"), *jobs) == ["other"]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(-3, 8), st.integers(1, 3)), max_size=5),
    st.integers(0, 2),
    st.randoms(),
)
def test_enough_and_no_more(
    devices: int, jobs: list[tuple[int, int]], free: int, chance: random.Random
) -> None:
    ids = iter(range(100))
    occupants = [
        occupant(str(n), priority, *(next(ids) for _ in range(count)), claimed=priority + chance.random() * 9)
        for n, (priority, count) in enumerate(jobs)
    ]
    unused = frozenset[DeviceId](next(ids) for _ in range(free))
    room = room_for(waiting(devices=devices), occupants, unused, fairly=False)
    lower = [each for each in occupants if each.priority < 5 and each.claimed_priority < 5]
    possible = free + sum(len(each.devices) for each in lower) >= devices
    assert (room is not None) == (possible and free < devices)
    if room is not None:
        gone = [each for each in lower if each.id in room.leaving]
        assert len(gone) == len(room.leaving)
        assert len(room.devices) == devices
        assert room.devices <= unused.union(*(each.devices for each in gone))
        for each in gone:
            assert free + sum(len(other.devices) for other in gone if other is not each) < devices


def beat(database: Database, worker_id: str, devices: int = 1, **fields: Any) -> None:
    own = [{"id": number, "name": "H100", "kind": "cuda", "memory_bytes": 2**36} for number in range(devices)]
    worker = Worker(id=worker_id, hostname=worker_id, started_at=None, devices=own, running=[], **fields)
    with database.writing() as session:
        live_workers.beat(session, worker)


def running(database: Database, worker_id: str, aged: float = 0.0, **changes: Any) -> Fence:
    """A job that a worker runs, after it waited so long that it counted as much as `aged` points."""
    job_id = submitted(database, **changes)
    with database.writing() as session:
        values = {"created_at": Job.created_at - aged * AGEING_SECONDS}
        session.execute(update(Job).where(Job.id == job_id).values(values))
        fence = queue.claim(session, worker_id, 60.0, Offer(8, only=job_id))
        assert fence is not None
    return fence


def waits(database: Database, seconds: float = 30.0, devices: int = 1, **changes: Any) -> str:
    """A job that has waited in the queue."""
    job_id = submitted(database, **changes)
    with database.writing() as session:
        values = {"created_at": database_now() - seconds, "device_count": devices}
        session.execute(update(Job).where(Job.id == job_id).values(values))
    return job_id


def view(*fences: Fence, free: tuple[int, ...] = (), **fields: Any) -> WorkerView:
    """A worker whose jobs run on its devices 0, 1, …"""
    own = {fence.job_id: frozenset[DeviceId]([number]) for number, fence in enumerate(fences)}
    worker_id = fences[0].worker_id if fences else "worker-1"
    fields = {"worker_id": worker_id, "labels": {}, "running": own, "free": frozenset(free), **fields}
    return WorkerView(**fields)


def found(database: Database, own: WorkerView) -> Room | None:
    with database.reading() as session:
        return preemption.find_room(session, own)


def test_a_job_with_a_higher_priority_gets_the_device_of_another(database: Database) -> None:
    beat(database, "worker-1")
    fence = running(database, "worker-1")
    urgent = waits(database, priority=1)
    assert found(database, view(fence)) == Room(urgent, frozenset([0]), (fence.job_id,))
    with database.writing() as session:
        queue.make_way(session, fence, "a job with a higher priority needs its device")
    with database.writing() as session:
        first = queue.claim(session, "worker-1", 60.0)
        second = queue.claim(session, "worker-1", 60.0)
    assert (first and first.job_id, second and second.job_id) == (urgent, fence.job_id)


def test_room_is_made_once_for_a_job(database: Database) -> None:
    beat(database, "worker-1")
    fence, urgent = running(database, "worker-1"), waits(database, priority=1)
    with database.writing() as session:
        assert preemption.try_claim_preemption(session, urgent)
        assert not preemption.try_claim_preemption(session, urgent)
    assert found(database, view(fence)) is None
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == urgent).values(preempts_after=database_now() - 1))
    assert found(database, view(fence)) is not None


@pytest.mark.parametrize(
    ("seconds", "changes"),
    [(5.0, {"priority": 9}), (30.0, {"priority": 0}), (30.0, {"priority": 9, "paused": True})],
    ids=["waits for a moment only", "same priority", "paused"],
)
def test_nothing_makes_way_without_need(database: Database, seconds: float, changes: dict[str, Any]) -> None:
    beat(database, "worker-1")
    fence = running(database, "worker-1")
    waits(database, seconds, **changes)
    assert found(database, view(fence)) is None


def test_a_job_that_waited_for_long_keeps_its_device(database: Database) -> None:
    beat(database, "worker-1")
    fence = running(database, "worker-1", aged=11.0)
    waits(database, priority=10)
    assert found(database, view(fence)) is None
    waits(database, priority=12)
    assert found(database, view(fence)) is not None


def test_time_that_a_job_ran_does_not_count_as_waiting(database: Database) -> None:
    """Its worker was restarted after a day: it is queued again for a moment only."""
    beat(database, "worker-1")
    fence = running(database, "worker-1", aged=144.0)
    with database.writing() as session:
        queue.release(session, fence, "the worker was shut down")
        again = queue.claim(session, "worker-1", 60.0)
    assert again is not None
    waits(database, priority=1)
    assert found(database, view(again)) is not None


def test_devices_that_are_held_or_reserved_for_others_do_not_count(database: Database) -> None:
    beat(database, "worker-1", devices=3)
    fence, urgent = running(database, "worker-1"), waits(database, priority=1)
    alone = Room(urgent, frozenset([0]), (fence.job_id,))
    assert found(database, view(fence, free=(1,))) is None
    assert found(database, view(fence, free=(1,), held=frozenset([1]))) == alone
    reserved = Reserved("ftjob-ahead", 0.0, frozenset([1]))
    assert found(database, view(fence, free=(1,), reserved=(reserved,))) == alone
    behind = Reserved("ftjob-behind", 1e18, frozenset([1]))
    assert found(database, view(fence, free=(1,), reserved=(behind,))) is None
    its_own = Reserved(urgent, 0.0, frozenset([1]))
    assert found(database, view(fence, free=(1,), reserved=(its_own,))) is None


def test_a_device_that_is_held_is_not_promised_twice(database: Database) -> None:
    beat(database, "worker-1", devices=2)
    stopping, other = running(database, "worker-1"), running(database, "worker-1")
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == stopping.job_id).values(requested="stop"))
    urgent = waits(database, priority=1)
    assert found(database, view(stopping, other)) is None
    held = view(stopping, other, held=frozenset([0]))
    assert found(database, held) == Room(urgent, frozenset([1]), (other.job_id,))


@pytest.mark.parametrize("requested", ["pause", "cancel", "stop"])
def test_a_job_that_leaves_anyway_is_not_interrupted_and_frees_its_device(
    database: Database, requested: str
) -> None:
    beat(database, "worker-1", devices=2)
    going, staying = running(database, "worker-1"), running(database, "worker-1")
    waits(database, priority=1)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == going.job_id).values(requested=requested))
    assert found(database, view(going, staying)) is None
    wide = waits(database, devices=2, priority=1)
    assert found(database, view(going, staying)) == Room(wide, frozenset([0, 1]), (staying.job_id,))


def test_a_job_that_only_saves_its_model_interrupts_none(database: Database) -> None:
    beat(database, "worker-1")
    fence, urgent = running(database, "worker-1"), waits(database, priority=1)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == urgent).values(requested="stop"))
    assert found(database, view(fence)) is None


def test_a_job_behind_one_that_cannot_be_satisfied_is_served(database: Database) -> None:
    beat(database, "worker-1", devices=2)
    low, high = running(database, "worker-1"), running(database, "worker-1", priority=9)
    waits(database, devices=2, priority=5)
    urgent = waits(database, priority=4)
    assert found(database, view(low, high)) == Room(urgent, frozenset([0]), (low.job_id,))


def test_unusable_devices_do_not_count(database: Database) -> None:
    """A GPU that failed is among the worker's devices, but not among the free ones."""
    beat(database, "worker-1", devices=2)
    fence, urgent = running(database, "worker-1"), waits(database, priority=1)
    assert found(database, view(fence)) == Room(urgent, frozenset([0]), (fence.job_id,))
    assert found(database, view(fence, free=(1,))) is None


def test_a_free_worker_takes_the_job_unless_it_does_not(database: Database) -> None:
    beat(database, "worker-1")
    beat(database, "worker-2")
    fence = running(database, "worker-1")
    waits(database, 30.0, priority=1)
    assert found(database, view(fence)) is None
    waits(database, 90.0, priority=1)
    assert found(database, view(fence)) is not None, "worker-2 may be draining"


def test_the_worker_with_the_lowest_priority_goes_first_but_others_do_not_wait_for_ever(
    database: Database,
) -> None:
    beat(database, "worker-1")
    beat(database, "worker-2")
    one, other = running(database, "worker-1", priority=1), running(database, "worker-2", priority=0)
    waits(database, 15.0, priority=2)
    assert found(database, view(one)) is None
    assert found(database, view(other)) is not None
    waits(database, 25.0, priority=2)
    assert found(database, view(one)) is not None


def test_only_jobs_that_the_worker_may_run_count(database: Database) -> None:
    beat(database, "worker-1", labels={"zone": "a"})
    fence = running(database, "worker-1")
    urgent = waits(database, priority=2, requirements={"zone": "b"})
    assert found(database, view(fence, labels={"zone": "a"})) is None
    assert found(database, view(fence, labels={"zone": "b"})) == Room(urgent, frozenset([0]), (fence.job_id,))


def test_a_wide_job_needs_several_but_only_one_where_jobs_train_on_one(database: Database) -> None:
    beat(database, "worker-1", devices=2)
    one, two = running(database, "worker-1"), running(database, "worker-1")
    waits(database, devices=2, priority=1)
    room = found(database, view(one, two))
    assert room is not None
    assert set(room.leaving) == {one.job_id, two.job_id}
    alone = found(database, view(one, two, one_device=True))
    assert alone is not None
    assert len(alone.leaving) == len(alone.devices) == 1
