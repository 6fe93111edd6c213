"""Which devices are kept for which jobs: nobody starves, and devices do not stand idle for nothing."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from app.jobs import lifecycle, queue
from app.jobs.queue import Offer
from app.jobs.reservations import DeviceId, DeviceTier, ReservableJob, jobs_to_reserve_for, tiers
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.submissions import submitted

DEVICES = tuple(range(8))
HOUR = 3600.0

drawn_needs = st.lists(
    st.builds(
        ReservableJob,
        place=st.floats(0, 100),
        devices=st.integers(1, 8),
        gpu_ids=st.frozensets(st.integers(0, 9), max_size=4),
        waited_seconds=st.floats(0, 1000),
    ),
    max_size=5,
).map(lambda drawn: sorted(drawn, key=lambda job: job.place))


@given(drawn_needs, st.sets(st.sampled_from(DEVICES)), st.sets(st.sampled_from(DEVICES)), st.randoms())
def test_tiers(wanted: list[ReservableJob], free: set[int], busy: set[int], chance: random.Random) -> None:
    soon = {device: chance.uniform(1, 1000) for device in busy - free}
    found = tiers(wanted, sorted(free), soon)
    assert found[0].devices == tuple(sorted(free))
    assert found[-1].before_place == inf
    for one, following in pairwise(found):
        assert one.before_place <= following.before_place
        assert set(one.devices) >= set(following.devices)


def test_free_devices_and_those_free_soonest_are_kept() -> None:
    wide = ReservableJob(1.0, 3, frozenset(), waited_seconds=100)
    assert tiers([wide], [0, 1], {2: 50.0, 3: 10.0}) == [DeviceTier(1.0, (0, 1), ""), DeviceTier(inf, ())]
    assert tiers([wide], [0], {1: 1.0, 2: 2.0, 3: 99.0}) == [DeviceTier(1.0, (0,), ""), DeviceTier(inf, ())]


def test_only_the_gpus_that_a_job_names_are_kept() -> None:
    pinned = ReservableJob(1.0, 2, frozenset({0, 5}), waited_seconds=100)
    assert tiers([pinned], [0, 1, 2], {5: 50.0}) == [DeviceTier(1.0, (0, 1, 2), ""), DeviceTier(inf, (1, 2))]


@pytest.mark.parametrize(
    "job",
    [
        ReservableJob(1.0, 5, frozenset(), 1e6),
        ReservableJob(1.0, 1, frozenset({9}), 1e6),
        ReservableJob(1.0, 2, frozenset({0, 9}), 1e6),
        ReservableJob(1.0, 2, frozenset(), 1e6),
        ReservableJob(1.0, 4, frozenset(), 10.0),
    ],
    ids=["too many", "no such GPU", "one of them is missing", "can start now", "would wait for longer"],
)
def test_nothing_is_kept_without_need(job: ReservableJob) -> None:
    assert tiers([job], [0, 1], {2: 60.0, 3: 60.0}) == [DeviceTier(inf, (0, 1))]


def test_a_job_that_needs_more_devices_than_there_are_gets_all() -> None:
    wide = ReservableJob(1.0, 16, frozenset(), 1e6)
    assert tiers([wide], [0, 1], {2: 60.0}, shrink_above=3) == [
        DeviceTier(1.0, (0, 1), ""),
        DeviceTier(inf, ()),
    ]
    assert tiers([wide], [0, 1], {2: 60.0}) == [DeviceTier(inf, (0, 1))], "another worker has more devices"


def test_devices_are_kept_for_several_jobs() -> None:
    first, second = ReservableJob(1.0, 2, frozenset(), 1e6), ReservableJob(2.0, 1, frozenset({3}), 1e6)
    assert tiers([first, second], [0], {1: 5.0, 2: 9.0, 3: 90.0}) == [
        DeviceTier(1.0, (0,), ""), DeviceTier(2.0, (), ""), DeviceTier(inf, ())
    ]  # fmt: skip


@dataclass
class Simulated:
    """A job of the simulation."""

    arrives: float
    seconds: float
    devices: int = 1
    gpu_ids: frozenset[int] = frozenset()
    started: float | None = None
    on: tuple[DeviceId, ...] = ()


Policy = Callable[[list[Simulated], list[DeviceId], dict[DeviceId, float], float], list[DeviceTier]]


@dataclass
class Machine:
    """Eight devices on which jobs start as in `Supervisor._claim_for_free_devices`, on a simulated clock."""

    jobs: list[Simulated]
    policy: Policy
    now: float = 0.0
    running: list[Simulated] = field(default_factory=list)
    waiting: list[Simulated] = field(default_factory=list)

    def run(self) -> float:
        """Runs all jobs. Returns the share of device time that was used until the last start."""
        coming = sorted(self.jobs, key=lambda job: job.arrives)
        while coming or self.waiting:
            while (start := self._next_start()) is not None:
                job, job.on = start
                job.started = self.now
                assert not any(set(job.on) & set(other.on) for other in self.running), "devices overlap"
                self.waiting.remove(job)
                self.running.append(job)
            ends = [job.started + job.seconds for job in self.running if job.started is not None]
            self.now = min([*ends, *(job.arrives for job in coming[:1])])
            self.running = [
                j for j in self.running if j.started is not None and j.started + j.seconds > self.now
            ]
            while coming and coming[0].arrives <= self.now:
                self.waiting.append(coming.pop(0))
        used = sum(job.seconds * len(job.on) for job in self.jobs)
        last = max(job.started + job.seconds for job in self.jobs if job.started is not None)
        return used / (last * len(DEVICES))

    def _next_start(self) -> tuple[Simulated, tuple[DeviceId, ...]] | None:
        taken = {device: job for job in self.running for device in job.on}
        free: list[DeviceId] = [device for device in DEVICES if device not in taken]
        busy = {
            device: job.started + job.seconds - self.now
            for device, job in taken.items()
            if job.started is not None
        }
        for tier in self.policy(self.waiting, free, busy, self.now):
            for job in self.waiting:
                fits = set(job.gpu_ids) <= set(tier.devices) and job.devices <= len(tier.devices)
                if job.arrives < tier.before_place and fits:
                    return job, tuple(sorted(job.gpu_ids)) or tier.devices[: job.devices]
        return None


def ours(
    waiting: list[Simulated], free: list[DeviceId], busy: dict[DeviceId, float], now: float
) -> list[DeviceTier]:
    wanted = [
        ReservableJob(job.arrives, job.devices, job.gpu_ids, now - job.arrives)
        for job in waiting
        if (job.devices > 1 or job.gpu_ids) and now - job.arrives >= 60
    ]
    return tiers(wanted, free, busy)


def first_come_first_served(
    waiting: list[Simulated], free: list[DeviceId], busy: dict[DeviceId, float], now: float
) -> list[DeviceTier]:
    return [DeviceTier(job.arrives + 1e-9, tuple(free)) for job in waiting[:1]]


def nothing_kept(
    waiting: list[Simulated], free: list[DeviceId], busy: dict[DeviceId, float], now: float
) -> list[DeviceTier]:
    return [DeviceTier(inf, tuple(free))]


def mixed(seed: int, jobs: int = 200) -> list[Simulated]:
    """Jobs of one to eight devices, some on certain GPUs, that together keep the machine busy."""
    chance = random.Random(seed)

    def draw() -> Iterator[Simulated]:
        at = 0.0
        for _ in range(jobs):
            at += chance.expovariate(1 / 400)
            devices = chance.choices((1, 2, 4, 8), (70, 15, 10, 5))[0]
            pinned = chance.random() < 0.1
            gpu_ids = frozenset(chance.sample(DEVICES, devices)) if pinned else frozenset[int]()
            yield Simulated(at, chance.lognormvariate(6.5, 1.2), devices, gpu_ids)

    return list(draw())


@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_mixed_jobs_on_eight_devices(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    by_policy = {}
    for policy in (ours, first_come_first_served):
        machine = Machine(mixed(seed), policy)
        utilisation = machine.run()
        waits = [job.started - job.arrives for job in machine.jobs if job.started is not None]
        assert len(waits) == 200
        by_policy[policy.__name__] = (utilisation, max(waits), sum(waits) / len(waits))
    record_property("utilisation, longest and mean wait", by_policy)
    (used, _, mean), (used_fcfs, _, mean_fcfs) = by_policy["ours"], by_policy["first_come_first_served"]
    assert used >= used_fcfs - 0.01
    assert mean <= mean_fcfs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wide", [Simulated(500.0, HOUR, 8), Simulated(500.0, HOUR, 2, frozenset({0, 1}))])
def test_a_stream_of_small_jobs_does_not_starve_a_wide_one(seed: int, wide: Simulated) -> None:
    chance = random.Random(seed)
    small = [Simulated(60.0 * n, chance.uniform(400, 800)) for n in range(2000)]
    job = Simulated(wide.arrives, wide.seconds, wide.devices, wide.gpu_ids)
    Machine([*small, job], ours).run()
    assert job.started is not None
    assert job.started - job.arrives <= 3 * 800


def test_a_wide_job_behind_a_long_one_does_not_make_devices_idle_for_long() -> None:
    long, wide = Simulated(0.0, 100 * HOUR), Simulated(1.0, HOUR, 8)
    small = [Simulated(2.0 + 100 * n, 700.0) for n in range(3600)]
    machine = Machine([long, wide, *small], ours)
    machine.run()
    for job in small:
        if job.arrives < 49 * HOUR:
            assert job.started is not None
            assert job.started - job.arrives <= 700
    assert wide.started == 100 * HOUR


def test_the_queue_tells_which_jobs_need_devices(database: Database) -> None:
    young = submitted(database, device_count=2)
    submitted(database, gpu_ids=(1,))
    submitted(database, device_count=2)
    submitted(database, device_count=2, gpu_ids=(0, 9))
    submitted(database)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id != young).values(created_at=Job.created_at - 100))
    with database.reading() as session:
        found = jobs_to_reserve_for(session, 60, [0, 1], shrink_above=2)
        assert [(job.devices, job.gpu_ids) for job in found] == [(2, frozenset())], "one GPU is enough"
        assert all(100 <= job.waited_seconds < 200 for job in found)
        assert [job.devices for job in jobs_to_reserve_for(session, 60, [0], shrink_above=1)] == [2], (
            "on fewer"
        )
        assert jobs_to_reserve_for(session, 60, [0], shrink_above=8) == []


def test_devices_are_kept_only_for_jobs_that_the_worker_may_run(database: Database) -> None:
    submitted(database, device_count=2, requirements={"zone": "b"})
    with database.writing() as session:
        session.execute(update(Job).values(created_at=Job.created_at - 100))
    with database.reading() as session:
        assert jobs_to_reserve_for(session, 60, [0, 1], shrink_above=2, labels={"zone": "a"}) == []
        assert (
            len(jobs_to_reserve_for(session, 60, [0, 1], shrink_above=2, labels={"zone": "b", "disk": "ssd"}))
            == 1
        )
        labels, required = {"zone": "b"}, ('{"zone": "b"}',)
        assert jobs_to_reserve_for(session, 60, [0], shrink_above=8, labels=labels) == []
        assert len(jobs_to_reserve_for(session, 60, [0], 8, labels, required, of_worker=1)) == 1, (
            "no worker has enough"
        )
        assert jobs_to_reserve_for(session, 60, [0], 8, labels, required, of_worker=2) == [], (
            "one is set aside"
        )


def test_a_pause_does_not_count_as_waiting(database: Database) -> None:
    paused = submitted(database, device_count=2)
    with database.writing() as session:
        session.execute(update(Job).values(created_at=Job.created_at - 10_000))
        lifecycle.pause(session, paused)
    with database.writing() as session:
        lifecycle.resume(session, paused)
    with database.reading() as session:
        [job] = jobs_to_reserve_for(session, 0, [0, 1], shrink_above=2)
        assert job.waited_seconds < 1000


def test_only_jobs_ahead_of_a_kept_place_may_start(database: Database) -> None:
    first = submitted(database)
    second = submitted(database)
    with database.reading() as session:
        place = session.get_one(Job, second).place
    with database.writing() as session:
        claimed = queue.claim(session, "worker-1", 15.0, Offer(1, before_place=place))
        assert claimed is not None
        assert claimed.job_id == first
        assert queue.claim(session, "worker-1", 15.0, Offer(1, before_place=place)) is None


def test_a_job_that_needs_more_devices_than_any_worker_has_takes_what_there_is(database: Database) -> None:
    submitted(database, device_count=4)
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 15.0, Offer(2, shrink_above=4)) is None
        assert queue.claim(session, "worker-1", 15.0, Offer(2, shrink_above=2)) is not None
