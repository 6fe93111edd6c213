"""The supervisor with real trainers, its clock and database disturbed."""

import hashlib
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import QueuePool

from app.contract.plan import Plan
from app.devices import gpus, live_workers
from app.devices.gpus import DetectedGpu
from app.jobs import lifecycle, queue, transitions
from app.jobs.transitions import Fence
from app.planning.devices import GIB
from app.planning.memory import bytes_on_disk
from app.settings import Settings
from app.storage.database import Database
from app.storage.disk import bytes_used
from app.storage.tables import Attempt, Job, JobEvent, StepMetric, Worker
from tests.harness.runs import small_data, until, write_texts
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted
from workers import temperature
from workers.job_inputs import PendingTrainer
from workers.job_start import JobStart
from workers.leases import Running
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.slots import Slots
from workers.supervisor import Supervisor
from workers.trainer_launcher import TrainerLauncher


@pytest.fixture
def supervisor(settings: Settings, database: Database) -> Iterator[Supervisor]:
    changes = {"poll_seconds": 0.05, "cpu_threads": 1, "heartbeat_seconds": 0.1}
    changes["lease_seconds"] = 600  # nobody renews them here, and a trainer ends before its lease does
    chosen = settings.model_copy(update=changes)
    supervisor = Supervisor(chosen, database, Slots(on_cpu=True))
    supervisor.locks._gpus = settings.data_dir  # not of other tests that run beside this one
    yield supervisor
    end_all(supervisor)


def end_all(supervisor: Supervisor) -> None:
    """Kills what it runs, and waits until it is gone."""
    for running in (*supervisor.running, *supervisor.leaving):
        running.trainer.kill()
    until(lambda: all(running.trainer.status() is not None for running in supervisor.running))
    until(lambda: all(running.trainer.status() is not None for running in supervisor.leaving))
    if supervisor.fork_server is not None:
        supervisor.fork_server.close()


def endless(settings: Settings, database: Database) -> str:
    """A queued job on forty texts that would train for a long time; gives its id."""
    path = settings.files_dir / "file-1"
    if not path.exists():
        write_texts(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return submitted(database, make_spec(data=small_data(sha256=digest), max_steps=100_000))


def job(database: Database, job_id: str) -> Job:
    with database.reading() as session:
        return transitions.get(session, job_id)


def turned(supervisor: Supervisor, database: Database, job_id: str) -> str:
    """A job's state after another turn."""
    supervisor.turn()
    return job(database, job_id).status


def turn(supervisor: Supervisor) -> None:
    supervisor.turn()
    supervisor._claim_for_free_devices()


def test_a_trainer_does_not_outlive_its_lease_while_the_database_is_unavailable(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    [running] = supervisor.running
    assert job(database, job_id).status == "running"
    until(lambda: running.trainer.pid is not None)  # it runs; before, its fork server loads libraries

    @contextmanager
    def away() -> Iterator[None]:
        raise OperationalError("SELECT 1", {}, OSError("connection refused"))
        yield

    monkeypatch.setattr(database, "writing", away)
    supervisor.turn()
    assert running.trainer.status() is None
    supervisor.leases.enforce()
    assert not running.lost
    running.lease_until = 0.0
    supervisor.leases.enforce()
    supervisor.turn()
    assert supervisor.running == []
    until(lambda: running.trainer.status() is not None, 5)


def test_an_unexpected_error_in_one_job_does_not_end_the_worker(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    broken, good = endless(settings, database), endless(settings, database)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == broken).values(spec={"no": "spec"}))
    turn(supervisor)
    assert job(database, broken).failures == 1
    assert job(database, broken).status == "queued"
    turn(supervisor)
    assert [running.fence.job_id for running in supervisor.running] == [good]


def test_an_unreadable_failure_file_counts_as_a_crash(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    [running] = supervisor.running
    until(lambda: running.trainer.pid is not None)
    running.trainer.kill()
    until(lambda: running.trainer.status() is not None, 5)
    (running.run.path / "failure.json").write_text("{")
    until(lambda: turned(supervisor, database, job_id) == "queued", 5)
    assert job(database, job_id).failures == 1


def test_a_resume_on_an_equal_device_keeps_the_plan(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    first = Plan.model_validate(job(database, job_id).plan)
    assert (first.predicted, first.threads) == (False, 1)
    fence = supervisor.running[0].fence
    with database.writing() as session:
        queue.release(session, fence, "test")
    supervisor.leases.beat(database)
    supervisor.turn()
    assert supervisor.running == []
    until(lambda: supervisor.turn() is None and not supervisor.leaving)  # type: ignore[func-returns-value]
    chosen = supervisor.settings.model_copy(update={"cpu_threads": 2})
    other = Supervisor(chosen, database, Slots(on_cpu=True))
    other._claim_for_free_devices()
    assert Plan.model_validate(job(database, job_id).plan) == first
    assert job(database, job_id).attempt == 2
    end_all(other)


def test_a_stopped_supervisor_returns_its_jobs_to_the_queue(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    supervisor.stop()
    supervisor.run()
    assert supervisor.running == []
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)


def ended(supervisor: Supervisor) -> None:
    """Turns until the one trainer that runs has ended, and its end is written."""
    until(lambda: supervisor.turn() is None and not supervisor.running)  # type: ignore[func-returns-value]


def stand_in(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Trainers are replaced by a shell script, which is given the run directory."""
    honest = subprocess.Popen

    def started(command: list[str], **named: Any) -> Any:
        return honest(["sh", "-c", script, "sh", command[-1]], **named)

    monkeypatch.setattr("workers.trainer_process.subprocess.Popen", started)
    start_directly(supervisor)


def start_directly(supervisor: Supervisor) -> None:
    """Lets the supervisor start trainers without a fork server."""
    launcher = replace(supervisor.start.launcher, fork_server=None)
    supervisor.start = replace(supervisor.start, launcher=launcher)


def test_a_second_stop_signal_kills_trainers_and_returns_their_jobs(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "trap '' TERM; while true; do sleep 0.1; done")  # it will not listen
    job_id = endless(settings, database)
    turn(supervisor)
    supervisor.stop()
    supervisor.stop()
    began = time.monotonic()
    supervisor.run()
    assert time.monotonic() - began < supervisor.settings.stop_grace_seconds / 3
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)


def test_an_interrupted_trainer_gets_the_time_that_its_checkpoint_takes(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint takes a second to write, which is longer than the grace of a small one."""
    hasty = supervisor.settings.model_copy(update={"stop_grace_seconds": 0.1})
    supervisor.start = JobStart(hasty, database, TrainerLauncher(hasty, database))
    write = 'trap \'sleep 1; touch "$1/written"; exit 75\' TERM; touch "$1/ready"; '
    stand_in(supervisor, monkeypatch, write + "while true; do sleep 0.1; done")
    endless(settings, database)
    for size in (500_000_000, 0):
        monkeypatch.setattr("workers.trainer_launcher.checkpoint_bytes", lambda spec, size=size: size)
        turn(supervisor)
        [running] = supervisor.running
        ready, written = running.run.path / "ready", running.run.path / "written"
        until(ready.exists)
        supervisor._interrupt(running, "a test")
        while supervisor.running:
            supervisor.leases.enforce()
            supervisor.turn()
            time.sleep(0.02)
        assert written.exists() == (size > 0)
        ready.unlink()
        written.unlink(missing_ok=True)


def test_a_job_that_is_still_being_fetched_can_be_asked_to_stop(
    supervisor: Supervisor, settings: Settings
) -> None:
    waits = threading.Event()
    run = RunDirectory(settings.runs_dir / "ftjob-1")
    fetching = PendingTrainer(lambda is_cancelled: waits.wait(30) and None)  # type: ignore[arg-type, return-value]
    running = Running(Fence("ftjob-1", 1, supervisor.id), (), fetching, run, 1e9, None, 1.0, 1)
    running.requested = "stop"
    supervisor._enforce_limits(running)
    assert (running.broken, fetching.status()) == (None, None)
    assert not run.path.exists()
    running.requested = "pause"
    supervisor._enforce_limits(running)
    assert fetching.status() == INTERRUPTED
    waits.set()


def test_a_drained_supervisor_finishes_running_jobs_and_claims_no_more(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "sleep 1; exit 75")
    first, second = endless(settings, database), endless(settings, database)
    turn(supervisor)
    supervisor.drain()
    supervisor.run()
    assert job(database, first).attempt == 1
    assert job(database, second).attempt == 0


def test_until_empty_ends_the_worker_when_the_queue_is_empty(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = '{"code": "bad_data", "message": "no", "permanent": true}'
    stand_in(supervisor, monkeypatch, f"echo '{failure}' > $1/failure.json; exit 1")
    ids = [endless(settings, database) for _ in range(3)]
    supervisor.until_empty = True
    supervisor.run()
    assert {job(database, job_id).status for job_id in ids} == {"failed"}


def test_until_empty_ends_a_worker_although_a_job_needs_another_one(
    supervisor: Supervisor, database: Database
) -> None:
    submitted(database, requirements={"zone": "elsewhere"})
    supervisor.until_empty = True
    supervisor.run()
    supervisor.settings = supervisor.settings.model_copy(update={"worker_labels": "zone=elsewhere"})
    assert not supervisor._is_done()


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("aside", [0, 1])
def test_a_job_that_is_wider_than_all_workers_that_may_run_it_starts(
    settings: Settings, database: Database, is_labelled: bool, aside: int
) -> None:
    """Even if one of the worker's devices is set aside, and another worker has enough, but may not run it."""
    chosen = settings.model_copy(update={"worker_labels": "zone=a", "reserve_after_seconds": 0.0})
    slots = Slots(on_cpu=True, cpu_devices=4)
    supervisor = Supervisor(chosen, database, slots)
    job_id = submitted(database, device_count=8, requirements={"zone": "a"} if is_labelled else {})
    elsewhere = [vars(device) for device in gpus.cpu_devices(8)]
    with database.writing() as session:
        live_workers.beat(session, supervisor.leases._row())
        if is_labelled:
            live_workers.beat(
                session,
                Worker(id="worker-b", hostname="b", devices=elsewhere, running=[], labels={"zone": "b"}),
            )
    for device in slots.available()[:aside]:
        slots.set_aside(device, "a test")
    free = slots.usable()
    with database.reading() as session:
        partly = supervisor.offers.make(session, slots, free[1:], {}, supervisor.labels())
        offers = supervisor.offers.make(session, slots, free, {}, supervisor.labels())
    assert supervisor._claim_first(partly) == (None, []), "it waits for the worker's other devices"
    fence, devices = supervisor._claim_first(offers)
    assert fence is not None
    assert (fence.job_id, devices) == (job_id, free)


def test_a_stuck_trainer_is_killed_and_its_job_retried(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.settings = supervisor.settings.model_copy(update={"no_progress_seconds": 0.4})
    stand_in(supervisor, monkeypatch, "for i in 1 2 3 4 5 6 7 8; do echo working; sleep 0.2; done; sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)
    began = time.monotonic()
    ended(supervisor)
    assert time.monotonic() - began > 1.5  # as long as it wrote, it was left alone
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 1)
    assert "the trainer wrote nothing" in told(database, job_id)


def told(database: Database, job_id: str) -> str:
    """What the job's events say, all together."""
    with database.reading() as session:
        return " ".join(session.scalars(select(JobEvent.message).where(JobEvent.job_id == job_id)))


def test_a_start_that_fails_leaves_no_trainer_behind(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr("workers.trainer_launcher.TrainerProcess", lambda *_, **__: started.append(1))
    monkeypatch.setattr(queue, "seconds_run", lambda *_: 1 / 0)  # the last step before the process
    job_id = endless(settings, database)
    with database.writing() as session:
        spec = transitions.get(session, job_id).spec
        session.execute(update(Job).values(spec={**spec, "timeout_seconds": 60.0}))
    turn(supervisor)
    assert (supervisor.running, started) == ([], [])
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 1)
    assert "ZeroDivisionError" in told(database, job_id)


def test_a_full_disk_postpones_the_job_without_counting_a_crash(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "exit 74")
    job_id = endless(settings, database)
    turn(supervisor)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)
    assert "the disk is full" in told(database, job_id)
    supervisor._claim_for_free_devices()
    assert supervisor.running == []  # not before there may be room
    with database.writing() as session:
        session.execute(update(Job).values(not_before=0.0))
    monkeypatch.setattr("workers.trainer_launcher.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    supervisor._claim_for_free_devices()
    assert supervisor.running == []
    assert (job(database, job_id).attempt, job(database, job_id).failures) == (2, 0)


def test_waiting_in_vain_for_an_earlier_trainer_is_no_crash(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "exit 73")
    job_id = endless(settings, database)
    turn(supervisor)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)
    assert "an earlier trainer of the job has not ended yet" in told(database, job_id)


def test_a_gpu_that_fails_is_set_aside_and_its_job_goes_to_another(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [DetectedGpu(n, f"GPU-{n}", "NVIDIA L4", 24 * GIB, 0, None, None) for n in range(2)]
    monkeypatch.setattr(gpus, "detected", lambda: seen)
    supervisor.slots = Slots(on_cpu=False)
    failure = '{"code": "device_lost", "message": "uncorrectable ECC error", "permanent": false}'
    stand_in(supervisor, monkeypatch, f"echo '{failure}' > $1/failure.json; exit 1")
    job_id = endless(settings, database)
    turn(supervisor)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)
    assert [device.id for device in supervisor.slots.usable()] == [1]
    monkeypatch.setattr("workers.slots.ASIDE_SECONDS", 0.0)
    supervisor.slots.set_aside(seen[0].device, "again")
    assert len(supervisor.slots.usable()) == 2  # tried again after a while


@pytest.mark.parametrize("device", ["a GPU that works", "a CPU"])
def test_a_reported_device_failure_is_checked_before_the_device_is_set_aside(
    supervisor: Supervisor,
    settings: Settings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    if device == "a GPU that works":
        seen = [DetectedGpu(0, "GPU-0", "NVIDIA L4", 24 * GIB, 0, None, None)]
        monkeypatch.setattr(gpus, "detected", lambda: seen)
        monkeypatch.setattr("workers.slots.gpu_works", lambda device: True)
        supervisor.slots = Slots(on_cpu=False)
    failure = '{"code": "device_lost", "message": "not true", "permanent": false}'
    stand_in(supervisor, monkeypatch, f"echo '{failure}' > $1/failure.json; exit 1")
    job_id = endless(settings, database)
    turn(supervisor)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 1)
    assert len(supervisor.slots.usable()) == 1


def test_an_unrequested_interruption_counts_as_a_crash(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "exit 75")
    job_id = endless(settings, database)
    turn(supervisor)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 1)


def test_endless_reports_are_stored_in_parts_and_dropped_for_cancelled_jobs(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.supervisor._TURN_SECONDS", 0.0)
    monkeypatch.setattr("workers.ingest._SECONDS_AT_ONCE", 0.0)
    stand_in(supervisor, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)
    [running] = supervisor.running
    event = '{"attempt": 1, "time": 1.0, "type": "note", "level": "info", "message": "again", "data": {}}'
    running.run.events.write_text(f"{event}\n" * 20_000)
    supervisor.turn()
    assert 0 < running.position.events < running.run.events.stat().st_size / 2
    with database.writing() as session:
        lifecycle.cancel(session, job_id)
    running.requested = "cancel"
    until(lambda: turned(supervisor, database, job_id) == "cancelled", 10)
    assert running.position.events < running.run.events.stat().st_size / 2


def test_a_job_is_requeued_if_its_gpu_disappears(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [DetectedGpu(0, "GPU-0", "NVIDIA L4", 24 * GIB, 0, None, None)]
    monkeypatch.setattr(gpus, "detected", lambda: seen)
    monkeypatch.setattr("workers.slots._MISSED_SECONDS", 3600.0)
    supervisor.slots = Slots(on_cpu=False)
    stand_in(supervisor, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)
    seen.clear()
    supervisor.turn()
    assert supervisor.running  # it may only have been looked away
    monkeypatch.setattr("workers.slots._MISSED_SECONDS", 0.0)
    ended(supervisor)
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)
    assert "has disappeared" in told(database, job_id)


def test_starting_a_trainer_releases_its_database_connection(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "sleep 60")
    endless(settings, database)
    turn(supervisor)
    assert supervisor.running
    assert isinstance(database.engine.pool, QueuePool)
    assert (database.engine.pool.checkedin(), database.engine.pool.checkedout()) == (1, 0)


@pytest.mark.thorough
def test_leases_are_renewed_while_the_supervisor_is_blocked(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"lease_seconds": 3.0, "heartbeat_seconds": 0.2}
    held_up = Supervisor(supervisor.settings.model_copy(update=short), database, Slots(on_cpu=True))
    stand_in(held_up, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    with held_up.leases.at_work():
        turn(held_up)
        time.sleep(6)  # the main loop does nothing for two leases
        with database.writing() as session:
            assert queue.reclaim_expired(session) == []
        assert not held_up.running[0].lost
    assert job(database, job_id).status == "running"
    end_all(held_up)


@pytest.mark.thorough
def test_a_stop_request_ends_training_and_saves_the_model(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    with supervisor.leases.at_work():
        until(lambda: bool(supervisor.turn() or job(database, job_id).progress.get("step")))
        with database.writing() as session:
            lifecycle.stop(session, job_id)
        until(lambda: bool(supervisor.turn() or job(database, job_id).status == "succeeded"))
    ended = job(database, job_id)
    assert "model.safetensors" in ended.result["files"]
    assert ended.result["steps"] < 100_000


@pytest.mark.parametrize("kind", ["a broken link", "a folder"])
def test_a_trainer_cannot_break_the_worker_through_the_finish_file(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stand_in(supervisor, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)
    mark = supervisor.running[0].run.path / "finish"
    mark.mkdir() if kind == "a folder" else mark.symlink_to("nowhere")
    supervisor.running[0].requested = "stop"
    turn(supervisor)
    assert supervisor.running[0].run.finish_requested()
    assert job(database, job_id).status == "running"


def test_an_error_while_handling_one_trainer_counts_as_its_job_s_crash(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)

    def broken(running: object) -> bool:
        raise NotADirectoryError(20, "Not a directory")

    monkeypatch.setattr(supervisor, "_is_stuck", broken)
    until(lambda: turned(supervisor, database, job_id) == "queued", 5)
    assert "Attempt 1 ended: the trainer crashed (NotADirectoryError" in told(database, job_id)


@pytest.mark.thorough
def test_training_pauses_until_a_hot_gpu_is_cooler_and_then_leaves_it(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    until(lambda: bool(supervisor.turn() or job(database, job_id).progress.get("step")))
    monkeypatch.setattr(supervisor.slots, "temperature", lambda device: 91.5)
    supervisor.turn()
    assert supervisor.running[0].interrupted_because is None  # no limit is set
    until(lambda: bool(supervisor.turn() or warmth(database, job_id) == 91.5))
    supervisor.settings = supervisor.settings.model_copy(
        update={"max_gpu_temperature": 90.0, "no_progress_seconds": 0.3}
    )
    until(lambda: bool(supervisor.turn() or "hotter than 90 °C" in told(database, job_id)))
    monkeypatch.setattr(supervisor.slots, "temperature", lambda device: 85.5)  # not by 5 degrees yet
    supervisor.turn()
    paused_at = job(database, job_id).progress["step"]
    for _ in range(10):
        time.sleep(0.1)
        supervisor.turn()
    assert supervisor.running[0].interrupted_because is None
    assert job(database, job_id).progress["step"] == paused_at
    supervisor.settings = supervisor.settings.model_copy(update={"no_progress_seconds": 60.0})
    monkeypatch.setattr(supervisor.slots, "temperature", lambda device: 84.5)
    until(lambda: bool(supervisor.turn() or job(database, job_id).progress["step"] > paused_at))
    assert "Training continues after a pause of" in told(database, job_id)
    monkeypatch.setattr(supervisor.slots, "temperature", lambda device: 91.5)
    monkeypatch.setattr(temperature, "MAX_COOLING_SECONDS", 0.5)
    until(lambda: bool(supervisor.turn() or job(database, job_id).status == "queued"))
    assert supervisor.slots.usable() == []
    assert "stayed too hot (ACCRUE_MAX_GPU_TEMPERATURE)" in told(database, job_id)


def warmth(database: Database, job_id: str) -> float | None:
    """Of the newest step."""
    with database.reading() as session:
        own = select(StepMetric.temperature_celsius).where(StepMetric.job_id == job_id)
        return session.scalar(own.order_by(StepMetric.step.desc()).limit(1))


@pytest.mark.thorough
def test_devices_are_held_until_all_jobs_have_made_way(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two jobs need different times for their checkpoints, and a third one waits for any free device."""
    seconds = iter((0.5, 3.0, 0.5))
    honest = subprocess.Popen

    def started(_: Any, **named: Any) -> Any:
        script = f'trap "sleep {next(seconds)}; exit 75" TERM; while true; do sleep 0.05; done'
        return honest(["sh", "-c", script], **named)

    changes = {"poll_seconds": 0.05, "cpu_threads": 2, "cpu_devices": 2, "lease_seconds": 600}
    chosen = settings.model_copy(update={**changes, "preemption": True})
    supervisor = Supervisor(chosen, database, Slots(on_cpu=True, cpu_devices=2))
    low = [endless(settings, database) for _ in range(2)]
    supervisor.leases.beat(database)
    monkeypatch.setattr("workers.trainer_process.subprocess.Popen", started)
    start_directly(supervisor)

    turn(supervisor)
    assert len(supervisor.running) == 2
    backlog, wide = endless(settings, database), endless(settings, database)
    with database.writing() as session:
        urgent = {
            "priority": 10,
            "device_count": 2,
            "created_at": Job.created_at - 20.0,
            "place": Job.place - 6000,
        }
        session.execute(update(Job).where(Job.id == wide).values(urgent))
    try:
        ends = time.monotonic() + 60
        while job(database, wide).status != "running" and time.monotonic() < ends:
            turn(supervisor)
            supervisor._make_way()
            assert job(database, backlog).attempt == 0
        assert job(database, wide).status == "running"
        assert [(job(database, each).status, job(database, each).attempt) for each in low] == [
            ("queued", 1)
        ] * 2
        assert len(supervisor.running) == 1
        supervisor.preemptor._next_look_at = 0.0
        supervisor._make_way()
        assert job(database, wide).status == "running", "nothing makes way for jobs with lower priorities"
    finally:
        end_all(supervisor)


@contextmanager
def a_full_worker(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, checkpoint_seconds: float
) -> Iterator[tuple[Supervisor, str, str]]:
    """A supervisor with one device, the job that makes way on it, and the job that is to run there."""
    honest = subprocess.Popen
    script = f'trap "sleep {checkpoint_seconds}; exit 75" TERM; while true; do sleep 0.05; done'
    chosen = settings.model_copy(update={"poll_seconds": 0.05, "lease_seconds": 600, "preemption": True})
    supervisor = Supervisor(chosen, database, Slots(on_cpu=True))
    start_directly(supervisor)
    low = endless(settings, database)
    supervisor.leases.beat(database)
    monkeypatch.setattr(
        "workers.trainer_process.subprocess.Popen", lambda _, **named: honest(["sh", "-c", script], **named)
    )
    turn(supervisor)
    urgent = endless(settings, database)
    with database.writing() as session:
        values = {"priority": 10, "created_at": Job.created_at - 20.0}
        session.execute(update(Job).where(Job.id == urgent).values(values))
    supervisor._make_way()
    assert urgent in supervisor.preemptor.held
    try:
        yield supervisor, low, urgent
    finally:
        end_all(supervisor)


@pytest.mark.thorough
def test_held_devices_are_given_back_if_the_job_no_longer_waits(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_full_worker(settings, database, monkeypatch, 1.0) as (supervisor, low, urgent):
        with database.writing() as session:
            lifecycle.cancel(session, urgent)
        ends = time.monotonic() + 60
        while job(database, low).attempt == 1 and time.monotonic() < ends:
            turn(supervisor)
        assert (job(database, low).status, job(database, low).attempt) == ("running", 2)
        assert not supervisor.preemptor.held


def test_a_database_error_neither_loses_the_room_nor_the_devices_locks(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = queue.claim

    def fails(*_: Any, **__: Any) -> Any:
        raise OperationalError("", {}, Exception("database is locked"))

    with a_full_worker(settings, database, monkeypatch, 0.0) as (supervisor, _, urgent):
        until(lambda: supervisor.running[0].trainer.status() is not None)
        supervisor.turn()
        monkeypatch.setattr(queue, "claim", fails)
        with pytest.raises(OperationalError):
            supervisor._claim_for_free_devices()
        monkeypatch.setattr(queue, "claim", claim)
        assert supervisor._claim_for_free_devices()
        assert job(database, urgent).status == "running"


def claimed_at(database: Database, job_id: str) -> float:
    with database.reading() as session:
        return session.scalars(select(Attempt.claimed_at).where(Attempt.job_id == job_id)).one()


def test_waiting_in_an_engine_s_queue_counts_neither_as_running_nor_as_silence(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(supervisor, monkeypatch, "sleep 60")
    job_id = endless(settings, database)
    turn(supervisor)
    (running,) = supervisor.running
    claimed = claimed_at(database, job_id)
    running.trainer.is_waiting = True  # type: ignore[misc]
    running.timeout_at = time.monotonic() + 0.2
    running.last_sign_at -= 10_000
    ends = time.monotonic() + 0.6
    while time.monotonic() < ends:
        supervisor.turn()
    assert (running.interrupted_because, running.stuck) == (None, False)
    assert claimed_at(database, job_id) == claimed
    running.trainer.is_waiting = False  # type: ignore[misc]
    supervisor.turn()
    assert claimed_at(database, job_id) >= claimed + 0.5
    time.sleep(0.25)
    supervisor.turn()
    assert running.timed_out, "from its start on, its time counts"


@pytest.mark.parametrize(("others", "is_interrupted"), [(0, True), (1, False)])
def test_a_job_that_got_fewer_devices_continues_on_more_once_they_are_there(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch, others: int, is_interrupted: bool
) -> None:
    chosen = settings.model_copy(
        update={"reserve_after_seconds": 0.0, "cpu_threads": 2, "cpu_devices": 2, "lease_seconds": 600}
    )
    supervisor = Supervisor(chosen, database, Slots(on_cpu=True, cpu_devices=2 + others))
    stand_in(supervisor, monkeypatch, "sleep 60")
    try:
        jobs = [endless(settings, database) for _ in range(1 + others)]
        turn(supervisor)
        supervisor.running[0].requested_devices = 2
        supervisor._let_grow()
        assert bool(supervisor.running[0].interrupted_because) == is_interrupted
        assert len(supervisor.running) == len(jobs)
    finally:
        end_all(supervisor)


def test_checkpoints_of_earlier_attempts_do_not_keep_a_job_from_going_on(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take a part of the space that the job needs in all."""
    spec = make_spec()
    folder = settings.runs_dir / "ftjob-1" / "checkpoints" / "step-000000001"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 2**20)
    (folder / "elsewhere").symlink_to("/dev/zero")
    used = bytes_used(settings.runs_dir / "ftjob-1")
    assert 2**20 <= used < 2**20 + 2**14
    free = bytes_on_disk(spec) - used
    monkeypatch.setattr("workers.trainer_launcher.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    launcher = TrainerLauncher(settings, database)
    launcher._check_disk_space(spec, "ftjob-1")
    with pytest.raises(OSError, match="No space left"):
        launcher._check_disk_space(spec, "ftjob-2")
