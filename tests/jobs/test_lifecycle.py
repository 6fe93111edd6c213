"""The state machine, on a real database."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import get_args

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.compiler import compiles

from app.contract.reports import Failure
from app.contract.spec import ValidationSpec
from app.contract.states import ENDED, JobStatus
from app.contract.worker_labels import no_worker_warning
from app.errors import Conflict, NotFound
from app.jobs import lifecycle, queue, transitions
from app.jobs.events import record_event
from app.jobs.lifecycle import AGEING_SECONDS
from app.jobs.queue import MAX_FAILURES, Offer
from app.jobs.transitions import EDGES, Fence, LostJob, change
from app.statistics import counters
from app.storage.database import Database, _postgresql_now, _sqlite_now, database_now
from app.storage.tables import Attempt, File, Job, JobEvent
from tests.harness.claims import claim, expire, in_transaction
from tests.harness.specs import cpu_plan, make_spec
from tests.harness.submissions import submitted

CRASH = Failure(code="trainer_killed", message="the trainer was ended by SIGKILL", permanent=False)


def state(database: Database, job_id: str) -> Job:
    with database.reading() as session:
        return transitions.get(session, job_id)


def test_a_job_is_claimed_once_with_a_new_attempt(database: Database) -> None:
    job_id = submitted(database)
    assert claim(database) == Fence(job_id, 1, "worker-1")
    assert claim(database) is None
    job = state(database, job_id)
    assert (job.status, job.attempt, job.worker_id) == ("running", 1, "worker-1")
    assert job.started_at is not None


def test_higher_priority_goes_first_and_then_the_older(database: Database) -> None:
    first, second = submitted(database), submitted(database)
    urgent = submitted(database, priority=5)
    order = [claim(database) for _ in range(3)]
    assert [fence.job_id for fence in order if fence] == [urgent, first, second]


def test_fifty_concurrent_claimers_claim_each_job_once(database: Database) -> None:
    ids = {submitted(database) for _ in range(20)}
    with ThreadPoolExecutor(16) as pool:
        fences = list(pool.map(lambda n: claim(database, f"worker-{n}"), range(50)))
    got = [fence.job_id for fence in fences if fence]
    assert len(got) == 20
    assert set(got) == ids


@pytest.mark.parametrize(
    "stale",
    [Fence("ftjob-none", 1, "worker-1"), Fence("{id}", 2, "worker-1"), Fence("{id}", 1, "worker-2")],
)
def test_only_the_owner_of_the_lease_can_write(database: Database, stale: Fence) -> None:
    job_id = submitted(database)
    claim(database)
    fence = Fence(stale.job_id.format(id=job_id), stale.attempt, stale.worker_id)
    for action in (
        lambda s: queue.renew_lease(s, fence, 15.0),
        lambda s: queue.note_progress(s, fence, {"step": 1}, 0),
        lambda s: queue.succeed(s, fence, {}),
        lambda s: queue.fail(s, fence, CRASH),
        lambda s: queue.crash(s, fence, CRASH),
        lambda s: queue.release(s, fence, "x"),
        lambda s: queue.store_plan(s, fence, cpu_plan(make_spec()), "cpu"),
    ):
        with pytest.raises(LostJob):
            in_transaction(database, action)
    assert state(database, job_id).status == "running"


def test_a_lost_worker_s_job_is_claimed_again_and_its_late_writes_are_rejected(database: Database) -> None:
    job_id = submitted(database)
    lost = claim(database)
    assert lost is not None
    assert in_transaction(database, queue.reclaim_expired) == []
    expire(database, job_id)
    assert in_transaction(database, queue.reclaim_expired) == [job_id]
    again = claim(database, "worker-2")
    assert again == Fence(job_id, 2, "worker-2")
    with pytest.raises(LostJob):
        in_transaction(database, queue.succeed, lost, {})
    assert state(database, job_id).failures == 0


def test_a_job_that_always_crashes_fails_and_the_queue_moves_on(database: Database) -> None:
    job_id, other = submitted(database), submitted(database)
    for _ in range(MAX_FAILURES):
        with database.writing() as session:
            session.execute(update(Job).where(Job.id == job_id).values(not_before=0.0))
        fence = claim(database)
        assert fence is not None
        assert fence.job_id == job_id
        in_transaction(database, queue.crash, fence, CRASH)
    job = state(database, job_id)
    assert job.status == "failed"
    assert job.error["code"] == "trainer_killed"
    assert "3 times without a new checkpoint" in job.error["message"]
    following = claim(database)
    assert following is not None
    assert following.job_id == other


def test_a_crashed_job_waits_before_its_next_attempt(database: Database) -> None:
    submitted(database)
    fence = claim(database)
    assert fence is not None
    in_transaction(database, queue.crash, fence, CRASH)
    assert claim(database) is None


def test_checkpoint_progress_resets_the_crash_count(database: Database) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(failures=2))
    in_transaction(database, queue.note_progress, fence, {"step": 3}, 0)
    assert state(database, job_id).failures == 2
    in_transaction(database, queue.note_progress, fence, {"step": 3}, 3)
    assert state(database, job_id).failures == 0


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_by_its_worker(database: Database) -> None:
    waiting, running = submitted(database), submitted(database, priority=1)
    fence = claim(database)
    assert fence is not None
    assert in_transaction(database, lifecycle.cancel, waiting).status == "cancelled"
    assert in_transaction(database, lifecycle.cancel, running).status == "running"
    assert in_transaction(database, queue.renew_lease, fence, 15.0) == "cancel"
    in_transaction(database, queue.release, fence, "cancelled")
    assert state(database, running).status == "cancelled"
    assert in_transaction(database, lifecycle.cancel, running).status == "cancelled"


def test_a_running_job_is_paused_on_request_and_resumed(database: Database) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    in_transaction(database, lifecycle.pause, job_id)
    assert in_transaction(database, queue.renew_lease, fence, 15.0) == "pause"
    in_transaction(database, queue.release, fence, "paused")
    assert state(database, job_id).status == "paused"
    assert claim(database) is None
    in_transaction(database, lifecycle.resume, job_id)
    assert claim(database) == Fence(job_id, 2, "worker-1")


def test_a_request_survives_a_lost_worker(database: Database) -> None:
    job_id = submitted(database)
    claim(database)
    in_transaction(database, lifecycle.cancel, job_id)
    expire(database, job_id)
    in_transaction(database, queue.reclaim_expired)
    assert state(database, job_id).status == "cancelled"


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
def test_a_terminal_state_never_changes(database: Database, end: str) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    if end == "succeeded":
        in_transaction(database, queue.succeed, fence, {"files": []})
    elif end == "failed":
        in_transaction(database, queue.fail, fence, CRASH)
    else:
        in_transaction(database, lifecycle.cancel, job_id)
        in_transaction(database, queue.release, fence, "cancelled")
    for action in (lifecycle.pause, lifecycle.resume):
        with pytest.raises(Conflict):
            in_transaction(database, action, job_id)
    if end != "cancelled":
        with pytest.raises(Conflict):
            in_transaction(database, lifecycle.cancel, job_id)
    for late in (lambda s: queue.succeed(s, fence, {}), lambda s: queue.crash(s, fence, CRASH)):
        with pytest.raises(LostJob):
            in_transaction(database, late)
    assert state(database, job_id).status == end
    assert claim(database) is None


def test_only_ended_jobs_can_be_deleted_together_with_their_files(database: Database) -> None:
    job_id = submitted(database)
    with pytest.raises(Conflict):
        in_transaction(database, lifecycle.remove, job_id)
    in_transaction(database, lifecycle.cancel, job_id)
    assert in_transaction(database, lifecycle.remove, job_id) == (job_id, ["file-1"])
    with database.reading() as session:
        for table in (Job, JobEvent, Attempt, File):
            assert session.scalar(select(func.count()).select_from(table)) == 0
        with pytest.raises(NotFound):
            transitions.get(session, job_id)


def test_inline_data_outlive_their_job_if_another_evaluates_on_them(database: Database) -> None:
    job_id = submitted(database)
    plain = make_spec()
    validation = ValidationSpec(file_id="file-1", sha256="0", format="text", share=None)
    spec = plain.model_copy(update={"data": plain.data.model_copy(update={"validation": validation})})
    with database.writing() as session:
        session.add(
            File(
                id="file-2", created_at=0.0, filename="f", purpose="fine-tune", bytes=1, sha256="0",
                format="text", examples=1, inline=False,
            )
        )  # fmt: skip
    other = submitted(database, spec)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == other).values(file_id="file-2"))
    in_transaction(database, lifecycle.cancel, job_id)
    assert in_transaction(database, lifecycle.remove, job_id) == (job_id, [])
    with database.reading() as session:
        assert session.get(File, "file-1") is not None
    in_transaction(database, lifecycle.cancel, other)
    assert in_transaction(database, lifecycle.remove, other) == (other, ["file-1"])
    with database.reading() as session:
        assert session.scalars(select(File.id)).all() == ["file-2"]


def test_every_transition_records_an_event(database: Database) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    in_transaction(database, queue.release, fence, "the worker was shut down")
    with database.reading() as session:
        told = session.scalars(
            select(JobEvent.type).where(JobEvent.job_id == job_id).order_by(JobEvent.id)
        ).all()
        outcome = session.scalar(select(Attempt.outcome))
    assert told == ["submitted", "started", "queued"]
    assert outcome == "the worker was shut down"


@contextmanager
def clock_moved(database: Database, seconds: float) -> Iterator[Database]:
    """The same database, with its clock moved."""
    moved = Database(database.url)
    honest = {"sqlite": _sqlite_now, "postgresql": _postgresql_now}
    for name, now in honest.items():
        compiles(database_now, name)(lambda *told, now=now, **named: f"({now(*told, **named)} + {seconds})")
    try:
        yield moved
    finally:
        for name, now in honest.items():
            compiles(database_now, name)(now)
        moved.close()


def test_a_clock_that_jumps_ahead_takes_no_job_from_a_worker_that_lives(database: Database) -> None:
    live, dead = submitted(database), submitted(database)
    held, lost = claim(database, "worker-1"), claim(database, "worker-2")
    assert held is not None
    assert lost is not None
    with clock_moved(database, 3600) as moved:
        in_transaction(moved, queue.renew_lease, held, 15.0)  # a worker renews before it rescues
        assert in_transaction(moved, queue.reclaim_expired) == [dead]
        assert state(moved, live).status == "running"
        again = claim(moved, "worker-1")
        assert again is not None
        assert again.attempt == 2
        with pytest.raises(LostJob):
            in_transaction(moved, queue.renew_lease, lost, 15.0)


def test_a_clock_set_back_does_not_keep_a_lost_job_for_an_hour(database: Database) -> None:
    live, dead = submitted(database), submitted(database)
    held = claim(database, "worker-1")
    claim(database, "worker-2")
    with clock_moved(database, -3600) as moved:
        in_transaction(moved, queue.renew_lease, held, 15.0)
        assert in_transaction(moved, queue.reclaim_expired) == [dead]
        assert state(moved, live).status == "running"


def test_a_long_wait_outranks_a_higher_priority(database: Database) -> None:
    patient, urgent = submitted(database), submitted(database, priority=1)
    with database.writing() as session:
        waited = Job.place - AGEING_SECONDS - 60
        session.execute(update(Job).where(Job.id == patient).values(place=waited))
    order = [claim(database) for _ in range(2)]
    assert [fence.job_id for fence in order if fence] == [patient, urgent]


def test_a_machine_failure_postpones_the_job_and_counts_no_crash(database: Database) -> None:
    job_id = submitted(database)
    fence = claim(database)
    in_transaction(database, queue.postpone, fence, "the disk is full", 60.0)
    job = state(database, job_id)
    assert (job.status, job.failures) == ("queued", 0)
    assert claim(database) is None
    in_transaction(database, lifecycle.pause, job_id)
    in_transaction(database, lifecycle.resume, job_id)  # whoever has made room need not wait
    assert claim(database) is not None


def test_retrying_a_failed_job_creates_a_new_job(database: Database) -> None:
    job_id = submitted(database)
    with pytest.raises(Conflict, match="is queued"), database.writing() as session:
        lifecycle.retry(session, job_id)
    with database.writing() as session:
        lifecycle.cancel(session, job_id)
    with database.writing() as session:
        again = transitions.get(session, lifecycle.retry(session, job_id).id)
        old = transitions.get(session, job_id)
        assert (again.status, old.status) == ("queued", "cancelled")
        assert (again.spec, again.file_id, again.client_metadata) == (
            old.spec,
            old.file_id,
            old.client_metadata,
        )
        assert again.plan["predicted"]


def test_a_stopped_job_is_claimed_again_until_its_model_is_kept(database: Database) -> None:
    job_id = submitted(database)
    with pytest.raises(Conflict, match="no checkpoint yet"):
        in_transaction(database, lifecycle.stop, job_id)
    fence = claim(database)
    assert fence is not None
    in_transaction(database, queue.note_progress, fence, {"step": 3}, 3)
    assert in_transaction(database, lifecycle.stop, job_id).requested == "stop"
    assert in_transaction(database, queue.renew_lease, fence, 15.0) == "stop"
    for refused in (lifecycle.pause, lifecycle.resume):
        with pytest.raises(Conflict, match="being stopped"):
            in_transaction(database, refused, job_id)
    in_transaction(database, queue.release, fence, "the worker was shut down")
    assert (state(database, job_id).status, state(database, job_id).requested) == ("queued", "stop")
    again = claim(database)
    assert again is not None
    in_transaction(database, queue.succeed, again, {"files": []})
    assert (state(database, job_id).status, state(database, job_id).requested) == ("succeeded", None)
    with pytest.raises(Conflict, match="nothing to stop"):
        in_transaction(database, lifecycle.stop, job_id)


def test_a_paused_job_with_a_checkpoint_can_be_stopped_or_still_cancelled(database: Database) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    in_transaction(database, queue.note_progress, fence, {"step": 3}, 3)
    in_transaction(database, lifecycle.pause, job_id)
    in_transaction(database, queue.release, fence, "paused")
    assert state(database, job_id).status == "paused"
    in_transaction(database, lifecycle.stop, job_id)
    assert (state(database, job_id).status, state(database, job_id).requested) == ("queued", "stop")
    in_transaction(database, lifecycle.cancel, job_id)
    assert (state(database, job_id).status, state(database, job_id).requested) == ("cancelled", None)


def test_only_timed_out_jobs_can_be_resumed_with_a_fresh_time_limit(database: Database) -> None:
    job_id = submitted(database, make_spec(timeout_seconds=60.0))
    fence = claim(database)
    assert fence is not None
    in_transaction(database, queue.release, fence, "shut down")
    with database.writing() as session:
        session.execute(update(Attempt).values(ended_at=Attempt.claimed_at + 50.0))
    fence = claim(database)
    assert fence is not None
    assert in_transaction(database, queue.seconds_run, fence) == pytest.approx(50.0)
    in_transaction(
        database, queue.fail, fence, Failure(code=lifecycle.TIMEOUT, message="too long", permanent=True)
    )
    assert state(database, job_id).finished_at is not None
    resumed = in_transaction(database, lifecycle.resume, job_id)
    assert (resumed.status, resumed.error, resumed.finished_at) == ("queued", None, None)
    fence = claim(database)
    assert fence is not None
    assert in_transaction(database, queue.seconds_run, fence) == 0.0
    in_transaction(
        database,
        queue.fail,
        fence,
        Failure(code="no_targets", message="nothing to learn", permanent=True),
    )
    with pytest.raises(Conflict, match="has ended"):
        in_transaction(database, lifecycle.resume, job_id)


def test_a_job_pinned_to_a_gpu_runs_only_there(database: Database) -> None:
    job_id = submitted(database, gpu_ids=(2,))
    other = submitted(database)
    assert claim(database) == Fence(other, 1, "worker-1")
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 15.0, Offer(1, (0,))) is None
        assert queue.claim(session, "worker-1", 15.0, Offer(2, (1, 2))) == Fence(job_id, 1, "worker-1")


@pytest.mark.parametrize(
    ("required", "labels", "meets"),
    [
        ({}, {}, True),
        ({}, {"zone": "a"}, True),
        ({"zone": "a"}, {}, False),
        ({"zone": "a"}, {"zone": "b"}, False),
        ({"zone": "a"}, {"zone": "a", "gpu_type": "H100"}, True),
        ({"zone": "a", "disk": "ssd"}, {"zone": "a"}, False),
        ({"a.b/c": 'it\'s "50 %" é'}, {"a.b/c": 'it\'s "50 %" é'}, True),
        ({"n": "1"}, {"n": "1.0"}, False),
    ],
)
def test_a_job_starts_only_on_a_worker_with_the_required_labels(
    database: Database, required: dict[str, str], labels: dict[str, str], meets: bool
) -> None:
    job_id = submitted(database, requirements=required)
    with database.writing() as session:
        claimed = queue.claim(session, "worker-1", 15.0, Offer(1, labels=labels))
    assert claimed == (Fence(job_id, 1, "worker-1") if meets else None)


def test_a_job_that_no_worker_may_run_lets_others_pass(database: Database) -> None:
    submitted(database, requirements={"zone": "b"})
    other = submitted(database)
    assert claim(database) == Fence(other, 1, "worker-1")


def test_a_job_trains_on_fewer_devices_if_no_worker_that_may_run_it_has_enough(database: Database) -> None:
    """Whatever the devices of workers that may not run it."""
    job_id = submitted(database, device_count=4, requirements={"zone": "a"})
    submitted(database, device_count=4, requirements={"zone": "b"})
    required, labels = '{"zone": "a"}', {"zone": "a", "disk": "ssd"}
    with database.reading() as session:
        assert queue.shrinkable_requirements(session, 3, labels, [{"zone": "b"}]) == (required,)
        assert queue.shrinkable_requirements(session, 3, labels, [{"zone": "a"}]) == ()
        assert queue.shrinkable_requirements(session, 4, labels, []) == (), "it has enough itself"
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 15.0, Offer(2, labels=labels)) is None, "it is not idle"
        some = Offer(2, labels=labels, shrinkable=(required,), of_worker=4)
        assert queue.claim(session, "worker-1", 15.0, some) is None, "some are set aside"
        own = Offer(3, labels=labels, shrinkable=(required,), of_worker=3)
        assert queue.claim(session, "worker-1", 15.0, own) == Fence(job_id, 1, "worker-1")
        assert queue.claim(session, "worker-1", 15.0, own) is None


def test_a_retried_job_has_no_warning_of_its_first_submission(database: Database) -> None:
    requirements = {"zone": "b"}
    spec = make_spec()
    own, other = no_worker_warning(requirements), "another warning"
    plan = cpu_plan(spec).model_copy(update={"warnings": (own, other)})
    job_id = submitted(database, spec, requirements=requirements, plan=plan)
    in_transaction(database, lifecycle.cancel, job_id)
    again = in_transaction(database, lifecycle.retry, job_id)
    assert again.plan["warnings"] == [other]


def test_a_worker_that_empties_the_queue_does_not_wait_for_jobs_that_it_may_not_run(
    database: Database,
) -> None:
    submitted(database, requirements={"zone": "b"})
    with database.reading() as session:
        assert queue.any_queued(session, {"zone": "b"})
        assert not queue.any_queued(session, {"zone": "a"})


def test_a_retried_job_requires_the_same_labels(database: Database) -> None:
    job_id = submitted(database, requirements={"zone": "b"})
    in_transaction(database, lifecycle.cancel, job_id)
    again = in_transaction(database, lifecycle.retry, job_id)
    assert json.loads(again.requirements) == {"zone": "b"}


def test_a_job_starts_where_enough_devices_are_free(database: Database) -> None:
    wide, pair = submitted(database, device_count=4), submitted(database, device_count=2, gpu_ids=(1, 3))
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 15.0, Offer(3, (0, 1, 2))) is None
        assert queue.claim(session, "worker-1", 15.0, Offer(2, (1, 3))) == Fence(pair, 1, "worker-1")
        assert queue.claim(session, "worker-1", 15.0, Offer(4)) == Fence(wide, 1, "worker-1")


@pytest.mark.parametrize("gpu_ids", [(), (0,), (62, 3, 0)])
def test_a_set_of_gpus_is_stored_as_a_number(database: Database, gpu_ids: tuple[int, ...]) -> None:
    job_id = submitted(database, gpu_ids=gpu_ids)
    with database.reading() as session:
        assert queue.gpus_of(transitions.get(session, job_id).gpu_mask) == tuple(sorted(gpu_ids))


def test_every_state_has_edges_and_terminal_states_have_none() -> None:
    assert set(EDGES) == set(get_args(JobStatus))
    assert {state for state, after in EDGES.items() if not after} == set(ENDED) - {"failed"}


@pytest.mark.parametrize(
    ("start", "to"), [("queued", "succeeded"), ("paused", "failed"), ("paused", "running")]
)
def test_a_job_changes_state_only_along_edges(database: Database, start: JobStatus, to: JobStatus) -> None:
    job_id = submitted(database, make_spec(), paused=start == "paused")
    with database.writing() as session, pytest.raises(LostJob):
        change(session, transitions.get(session, job_id, lock=True), to)
    with database.reading() as session:
        assert transitions.get(session, job_id).status == start


def test_a_resumed_job_counts_each_of_its_runs_once(database: Database) -> None:
    """In the counters of Prometheus, which never decrease: 20 s until the first timeout, then 5 s."""
    job_id = submitted(database)
    counted = []
    for seconds in (20.0, 5.0):
        fence = claim(database)
        assert fence is not None
        failure = Failure(code=lifecycle.TIMEOUT, message="too long", permanent=True)
        with database.writing() as session:
            record_event(session, transitions.get(session, job_id), "out_of_memory", "less memory")
        in_transaction(database, queue.fail, fence, failure)
        with database.writing() as session:
            job = session.get_one(Job, job_id)
            assert job.finished_at is not None
            job.started_at = job.finished_at - seconds
        for act in (None, lifecycle.resume):
            if act is not None:
                in_transaction(database, act, job_id)
            with database.reading() as session:
                found = counters.count(session)
            counted.append((round(found["job_seconds", "failed"], 3), found["oom_recoveries", ""]))
    assert counted == [(20.0, 1), (20.0, 1), (25.0, 2), (25.0, 2)]
