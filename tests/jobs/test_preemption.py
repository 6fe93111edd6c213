"""Which jobs make way: those with lower priorities, no more than necessary, by the decision of one worker."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from app.devices import live_workers
from app.jobs import preemption, queue
from app.jobs.preemption import Machine, Next, Occupant, chosen, making_way
from app.jobs.transitions import Fence
from app.storage.database import Database, database_now
from app.storage.tables import Job, Worker
from tests.harness.submissions import submitted

DEVICES = tuple(range(8))
LONG = 1e6


def next_job(
    priority: int = 5, devices: int = 1, gpu_ids: frozenset[int] = frozenset(), **fields: Any
) -> Next:
    own = {"id": "next", "owner": "", "place": 0.0, "requirements": "{}", "waited_seconds": 20.0, **fields}
    return Next(priority=priority, devices=devices, gpu_ids=gpu_ids, **own)


def occupant(name: str, priority: int, *devices: int, place: float = 0.0, owner: str = "") -> Occupant:
    return Occupant(name, owner, priority, place, frozenset(devices))


def machine(name: str, *occupants: Occupant, free: tuple[int, ...] = ()) -> Machine:
    return Machine(name, occupants, frozenset(free))


def names(occupants: list[Occupant]) -> list[str]:
    return [each.id for each in occupants]


def test_the_lowest_priority_and_then_the_newest_makes_way() -> None:
    own = machine(
        "a", occupant("high", 4, 0), occupant("old", 1, 1, place=1.0), occupant("new", 1, 2, place=2.0)
    )
    assert names(making_way(next_job(), own, fairly=False)) == ["new"]
    assert names(making_way(next_job(devices=2), own, fairly=False)) == ["new", "old"]
    assert names(making_way(next_job(devices=3), own, fairly=False)) == ["new", "old", "high"]
    assert making_way(next_job(devices=4), own, fairly=False) == []


def test_equal_priorities_do_not_make_way() -> None:
    own = machine("a", occupant("same", 5, 0), occupant("higher", 6, 1))
    assert making_way(next_job(priority=5), own, fairly=False) == []


def test_free_devices_are_used_first_and_no_job_leaves_in_vain() -> None:
    own = machine("a", occupant("small", 0, 0), occupant("wide", 1, 1, 2, 3), free=(4,))
    assert names(making_way(next_job(devices=2), own, fairly=False)) == ["small"]
    assert names(making_way(next_job(devices=4), own, fairly=False)) == ["wide"]


def test_a_job_gets_the_gpus_that_it_names() -> None:
    own = machine("a", occupant("other", 0, 0), occupant("its", 1, 1), free=(2,))
    wanted = next_job(devices=2, gpu_ids=frozenset({1, 2}))
    assert names(making_way(wanted, own, fairly=False)) == ["its"]


def test_with_fair_share_only_jobs_of_the_same_key_make_way() -> None:
    own = machine("a", occupant("other", 0, 0, owner="key-2"), occupant("own", 1, 1, owner="key-1"))
    assert names(making_way(next_job(owner="key-1"), own, fairly=True)) == ["own"]
    assert names(making_way(next_job(owner="key-1"), own, fairly=False)) == ["other"]


def test_one_worker_interrupts_where_least_is_lost() -> None:
    machines = [machine("a", occupant("one", 2, 0)), machine("b", occupant("two", 1, 0))]
    assert chosen(next_job(), machines, "a", fairly=False) is None
    assert chosen(next_job(), machines, "b", fairly=False) == ("next", ("two",))


def test_nobody_makes_way_if_a_worker_has_a_free_device_unless_it_does_not_take_the_job() -> None:
    machines = [machine("a", occupant("one", 2, 0)), machine("b", free=(0,))]
    assert chosen(next_job(), machines, "a", fairly=False) is None
    assert chosen(next_job(waited_seconds=90.0), machines, "a", fairly=False) == ("next", ("one",))


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
        occupant(str(n), priority, *(next(ids) for _ in range(count)), place=chance.random())
        for n, (priority, count) in enumerate(jobs)
    ]
    own = machine("a", *occupants, free=tuple(next(ids) for _ in range(free)))
    leaving = making_way(next_job(devices=devices), own, fairly=False)
    lower = [each for each in occupants if each.priority < 5]
    possible = free + sum(len(each.devices) for each in lower) >= devices
    assert bool(leaving) == (possible and free < devices)
    assert all(each in lower for each in leaving)
    for each in leaving:
        assert free + sum(len(other.devices) for other in leaving if other is not each) < devices


def beat(database: Database, worker_id: str, devices: int = 1, **fields: Any) -> None:
    own = [{"id": number, "name": "H100", "kind": "cuda", "memory_bytes": 2**36} for number in range(devices)]
    host = fields.pop("hostname", worker_id)
    worker = Worker(id=worker_id, hostname=host, started_at=None, devices=own, running=[], **fields)
    with database.writing() as session:
        live_workers.beat(session, worker)


def running(database: Database, worker_id: str, gpu_id: int = 0, **changes: Any) -> Fence:
    """A job that runs on a worker's GPU."""
    job_id = submitted(database, **changes)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(place=-LONG))
        fence = queue.claim(session, worker_id, 60.0)
        assert fence is not None
        assert fence.job_id == job_id
        session.execute(update(Job).where(Job.id == job_id).values(plan={"ranks": [{"gpu_id": gpu_id}]}))
    return fence


def waits(database: Database, seconds: float = 20.0, **changes: Any) -> str:
    """A job that has waited in the queue."""
    job_id = submitted(database, **changes)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(created_at=database_now() - seconds))
    return job_id


def decided(database: Database, worker_id: str, **labels: str) -> tuple[str, tuple[str, ...]] | None:
    with database.reading() as session:
        return preemption.decide(session, worker_id, labels)


def test_a_job_with_a_higher_priority_takes_the_place_of_another(database: Database) -> None:
    beat(database, "worker-1")
    fence = running(database, "worker-1")
    urgent = waits(database, priority=1)
    assert decided(database, "worker-1") == (urgent, (fence.job_id,))
    with database.writing() as session:
        queue.make_way(session, fence, "an urgent job needs its device")
    with database.writing() as session:
        first = queue.claim(session, "worker-1", 60.0)
        second = queue.claim(session, "worker-1", 60.0)
    assert (first and first.job_id, second and second.job_id) == (urgent, fence.job_id)


@pytest.mark.parametrize(
    ("seconds", "changes"),
    [(5.0, {"priority": 9}), (20.0, {"priority": 0}), (20.0, {"priority": 9, "paused": True})],
    ids=["waits for a moment only", "same priority", "paused"],
)
def test_nothing_makes_way_without_need(database: Database, seconds: float, changes: dict[str, Any]) -> None:
    beat(database, "worker-1")
    running(database, "worker-1")
    waits(database, seconds, **changes)
    assert decided(database, "worker-1") is None


def test_jobs_make_way_for_the_next_job_alone(database: Database) -> None:
    """The freed device would go to the older job, which is ahead."""
    beat(database, "worker-1")
    running(database, "worker-1", priority=1)
    old = waits(database, priority=0)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == old).values(place=-LONG))
    waits(database, priority=2)
    assert decided(database, "worker-1") is None


def test_workers_of_one_machine_know_each_others_devices(database: Database) -> None:
    beat(database, "worker-1", hostname="h")
    beat(database, "worker-2", hostname="h")
    fence = running(database, "worker-1")
    urgent = waits(database, priority=1)
    assert decided(database, "worker-2") is None
    assert decided(database, "worker-1") == (urgent, (fence.job_id,))


def test_only_workers_with_the_required_labels_count(database: Database) -> None:
    beat(database, "worker-1", labels={"zone": "a"})
    beat(database, "worker-2", labels={"zone": "b"})
    running(database, "worker-1")
    theirs = running(database, "worker-2", priority=1)
    urgent = waits(database, priority=2, requirements={"zone": "b"})
    assert decided(database, "worker-1", zone="a") is None
    assert decided(database, "worker-2", zone="b") == (urgent, (theirs.job_id,))


def test_a_wide_job_needs_several(database: Database) -> None:
    beat(database, "worker-1", devices=2)
    one, two = running(database, "worker-1", 0), running(database, "worker-1", 1)
    urgent = waits(database, priority=1)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == urgent).values(device_count=2))
    found = decided(database, "worker-1")
    assert found is not None
    assert (found[0], set(found[1])) == (urgent, {one.job_id, two.job_id})
