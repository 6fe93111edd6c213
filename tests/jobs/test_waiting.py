import random

from app.devices import live_workers
from app.devices.gpus import cpu_devices
from app.jobs import transitions
from app.jobs.waiting import WaitingReasons
from app.storage.database import Database
from app.storage.tables import Job, Worker
from tests.harness.claims import claim
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


def test_a_job_waits_for_as_many_devices_as_it_needs(database: Database) -> None:
    submitted(database, device_count=2)
    assert claim(database) is None
    one, two = submitted(database), submitted(database, device_count=2)
    with database.writing() as session:
        live_workers.beat(session, worker_with(2))
    reasons = {1: "starting", 2: "starting"}
    assert {1: reason_of(database, one), 2: reason_of(database, two)} == reasons
    assert claim(database) is not None
    third = submitted(database)
    assert {1: reason_of(database, third), 2: reason_of(database, two)} == {1: "starting", 2: "no_free_gpu"}


def test_devices_of_different_workers_do_not_add_up(database: Database) -> None:
    for _ in range(2):
        submitted(database)
    with database.writing() as session:
        for name in ("worker-1", "worker-2"):
            live_workers.beat(session, worker_with(2, name))
    for name in ("worker-1", "worker-2"):
        assert claim(database, name) is not None
    found = {count: reason_of(database, submitted(database, device_count=count)) for count in (1, 2, 3)}
    assert found == {1: "starting", 2: "no_free_gpu", 3: "no_free_gpu"}


def test_a_job_waits_for_a_worker_with_the_required_labels(database: Database) -> None:
    job_id = submitted(database, requirements={"zone": "b"})
    assert reason_of(database, job_id) == "no_worker"
    with database.writing() as session:
        live_workers.beat(session, worker_with(1, zone="a"))
    assert reason_of(database, job_id) == "no_matching_worker"
    submitted(database)
    with database.reading() as session:
        assert WaitingReasons(session).by_reason() == {"no_matching_worker": 1, "starting": 1}
    with database.writing() as session:
        live_workers.beat(session, worker_with(1, "worker-2", zone="b"))
    assert reason_of(database, job_id) == "starting"


def test_devices_of_workers_without_the_required_labels_do_not_count(database: Database) -> None:
    with database.writing() as session:
        live_workers.beat(session, worker_with(2, "worker-1", zone="a"))
        live_workers.beat(session, worker_with(4, "worker-2", zone="b"))
    for _ in range(2):
        submitted(database)
        claim(database)
    found = {count: submitted(database, device_count=count, requirements={"zone": "a"}) for count in (1, 4)}
    reasons = {count: reason_of(database, job_id) for count, job_id in found.items()}
    assert reasons == {1: "no_free_gpu", 4: "no_free_gpu"}, "worker-2 is idle, but may not run them"
    wide = submitted(database, device_count=8, requirements={"zone": "b"})
    assert reason_of(database, wide) == "starting", "it trains on fewer devices"


def worker_with(devices: int, name: str = "worker-1", **labels: str) -> Worker:
    found = [vars(device) for device in cpu_devices(devices)]
    return Worker(id=name, hostname="here", devices=found, running=[], labels=labels)


def reason_of(database: Database, job_id: str) -> str:
    with database.reading() as session:
        waiting = WaitingReasons(session).of(transitions.get(session, job_id))
    assert waiting is not None
    return waiting.reason


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
