import random

from app.jobs import transitions
from app.jobs.waiting import WaitingReasons
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.submissions import submitted


def positions(reasons_of: list[WaitingReasons], waiting: list[Job]) -> list[int]:
    told = [waiting_reasons.of(job) for waiting_reasons, job in zip(reasons_of, waiting, strict=True)]
    return [each.queue_position for each in told if each is not None]


def test_relative_queue_positions_equal_absolute_ones(database: Database) -> None:
    chance = random.Random(1)
    ids = [submitted(database, priority=chance.randint(-2, 2)) for _ in range(30)]
    with database.writing() as session:
        session.get_one(Job, ids[7]).place = session.get_one(Job, ids[3]).place  # the ids decide
    with database.reading() as session:
        waiting = [transitions.get(session, job_id) for job_id in chance.sample(ids, 30) + ids[:5]]
        one = WaitingReasons(session)
        counted = positions([one] * len(waiting), waiting)
        assert counted == positions([WaitingReasons(session) for _ in waiting], waiting)
        assert sorted(counted[:30]) == list(range(1, 31))


def test_jobs_of_one_transaction_share_cached_waiting_reasons(database: Database) -> None:
    submitted(database)
    with database.transaction() as transaction:
        within = database.within(transaction)
        found = []
        for _ in range(3):
            job_id = submitted(within)
            with within.writing() as session:
                waiting = WaitingReasons.within(session).of(transitions.get(session, job_id))
                assert waiting is not None
                found.append(waiting.queue_position)
        assert found == [2, 3, 4]
        assert list(transaction.known) == ["waiting_reasons"]
