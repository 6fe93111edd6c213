"""Fair share: which key goes first, on the database, and in a simulated month of twenty keys."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import pytest
from sqlalchemy import update

from app.jobs import queue
from app.jobs.queue import Offer
from app.security import keys
from app.storage.database import Database, database_now
from app.storage.tables import Attempt, Job, Usage
from app.usage import fair_share, records
from app.usage.fair_share import WaitingKey, in_turn, recent_use
from tests.harness.submissions import submitted

HOUR, DAY = 3600.0, 86400.0


def test_use_halves_in_a_week() -> None:
    used = recent_use([("a", 100, 800.0), ("a", 93, 800.0), ("b", 86, 800.0)], {"b": 50.0}, today=100)
    assert used == {"a": 800.0 + 400.0, "b": 200.0 + 50.0}


def test_the_key_that_has_used_least_goes_first_and_then_the_older_job() -> None:
    waiting = [WaitingKey("a", 1.0), WaitingKey("b", 3.0), WaitingKey("c", 2.0), WaitingKey("", 4.0)]
    assert in_turn(waiting, {"a": 10.0, "": 5.0}) == ["c", "b", "", "a"]


def key(database: Database) -> str:
    with database.writing() as session:
        return keys.create(session, "team", ("read", "write"), None)[0].id


def queued(database: Database, owner: str | None, **changes: int) -> str:
    job_id = submitted(database, **changes)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(owner=owner))
    return job_id


def claimed(database: Database, *, fairly: bool = True, offer: Offer = queue.ONE_DEVICE) -> str | None:
    with database.writing() as session:
        fence = queue.claim(session, "worker-1", 15.0, offer, fairly=fairly)
        return None if fence is None else fence.job_id


def test_keys_take_turns(database: Database) -> None:
    busy, other = key(database), key(database)
    jobs = [queued(database, busy) for _ in range(3)]
    late = queued(database, other)
    nobody_s = queued(database, None)
    assert claimed(database) == jobs[0], "no key has used anything, and this job is the oldest"
    with database.writing() as session:
        earlier = database_now() - HOUR
        session.execute(update(Attempt).where(Attempt.job_id == jobs[0]).values(claimed_at=earlier))
    assert [claimed(database) for _ in range(2)] == [late, nobody_s], "running jobs count"
    assert [claimed(database) for _ in range(3)] == [jobs[1], jobs[2], None]


def test_without_fair_share_the_queue_decides(database: Database) -> None:
    busy, other = key(database), key(database)
    jobs = [queued(database, busy), queued(database, busy), queued(database, other)]
    assert [claimed(database, fairly=False) for _ in range(3)] == jobs


def test_past_use_and_priorities_within_a_key(database: Database) -> None:
    busy, other = key(database), key(database)
    with database.writing() as session:
        today = int((session.scalar(queue.select(database_now())) or 0.0) // DAY)
        session.add(Usage(owner=busy, day=today - 3, device_seconds=HOUR, attempts=1))
    urgent = queued(database, busy, priority=100)
    first, second = queued(database, other), queued(database, other, priority=5)
    assert [claimed(database) for _ in range(3)] == [second, first, urgent]


def test_a_key_whose_jobs_do_not_fit_does_not_block_others(database: Database) -> None:
    wide, narrow = key(database), key(database)
    queued(database, wide, device_count=4)
    small = queued(database, narrow)
    with database.writing() as session:
        session.add(
            Usage(owner=narrow, day=records.number_of(records.date.today()), device_seconds=9e9, attempts=1)
        )
    assert claimed(database, offer=Offer(1, shrink_above=8)) == small
    with database.reading() as session:
        assert fair_share.order(session) == [wide]


@dataclass
class Month:
    """Devices that run jobs of keys for thirty days, by the rule of fair share or by age."""

    devices: int
    fairly: bool
    free: int = 0
    ended: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, arrivals: list[tuple[float, str, float]]) -> None:
        """Runs jobs, each given by its time of submission, its key and its seconds."""
        self.free = self.devices
        waiting: dict[str, list[tuple[float, float]]] = defaultdict(list)
        running: list[tuple[float, float, str]] = []
        coming = sorted(arrivals, reverse=True)
        while coming or running:
            now = min(running[0][0] if running else np.inf, coming[-1][0] if coming else np.inf)
            if now > 30 * DAY:
                break
            while coming and coming[-1][0] <= now:
                submitted_at, owner, seconds = coming.pop()
                waiting[owner].append((submitted_at, seconds))
            while running and running[0][0] <= now:
                end, start, owner = heapq.heappop(running)
                self.ended[owner, int(end // DAY)] += end - start
                self.total[owner] += end - start
                self.free += 1
            while self.free and any(waiting.values()):
                owner = self._next(waiting, running, now)
                submitted_at, seconds = waiting[owner].pop(0)
                self.waits[owner].append(now - submitted_at)
                heapq.heappush(running, (now + seconds, now, owner))
                self.free -= 1

    def _next(
        self,
        waiting: dict[str, list[tuple[float, float]]],
        running: list[tuple[float, float, str]],
        now: float,
    ) -> str:
        there = [WaitingKey(owner, jobs[0][0]) for owner, jobs in waiting.items() if jobs]
        if not self.fairly:
            return min(there, key=lambda each: each.place).owner
        so_far: dict[str, float] = defaultdict(float)
        for _, start, owner in running:
            so_far[owner] += now - start
        ended = [(owner, day, seconds) for (owner, day), seconds in self.ended.items()]
        return in_turn(there, recent_use(ended, so_far, int(now // DAY)))[0]


def demand() -> list[tuple[float, str, float]]:
    """Ten keys that submit more than there is room for, one of them a thousand jobs at once; and ten that
    submit two short jobs a day."""
    random = np.random.default_rng(7)
    found = [(0.0, "heavy-0", float(random.uniform(1, 6) * HOUR)) for _ in range(1000)]
    for number in range(1, 10):
        times = np.sort(random.uniform(0, 30 * DAY, 300))
        found += [(float(at), f"heavy-{number}", float(random.uniform(1, 6) * HOUR)) for at in times]
        found += [(0.0, f"heavy-{number}", float(random.uniform(1, 6) * HOUR)) for _ in range(10)]
    for number in range(10):
        times = random.uniform(0, 29 * DAY, 58)
        found += [(float(at), f"light-{number}", HOUR) for at in times]
    return found


def test_a_month_of_twenty_keys() -> None:
    fair, by_age = Month(8, fairly=True), Month(8, fairly=False)
    fair.run(demand())
    by_age.run(demand())
    heavy = [fair.total[f"heavy-{number}"] for number in range(10)]
    light = [name for name in fair.waits if name.startswith("light")]
    shares = [each / fmean(heavy) for each in heavy]
    waits = {
        "fair share": fmean(wait for name in light for wait in fair.waits[name]) / HOUR,
        "by age": fmean(wait for name in light for wait in by_age.waits[name]) / HOUR,
    }
    flood = by_age.total["heavy-0"] / fmean(by_age.total[f"heavy-{number}"] for number in range(1, 10))
    print(
        f"\nshares of keys with waiting jobs: {min(shares):.3f} to {max(shares):.3f} of the mean; "
        f"mean wait of occasional jobs: {waits['fair share']:.2f} h, by age {waits['by age']:.0f} h; "
        f"by age, the key with a thousand jobs got {flood:.1f} times the others' share"
    )
    assert min(shares) > 0.95
    assert max(shares) < 1.05
    assert len(fair.waits) == 20
    assert waits["fair share"] < 1.0 < 20.0 < waits["by age"]
    assert sum(fair.total.values()) == pytest.approx(8 * 30 * DAY, rel=0.02), "no device stands idle"
