"""The supervisor with real trainers, its clock and database disturbed."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from app import jobs
from app.database import Database
from app.models import Job
from app.schemas.spec import Plan
from app.settings import Settings
from tests.runs import small_data, until, write_texts
from tests.specs import make_spec
from tests.submissions import submitted
from workers.supervisor import Supervisor


@pytest.fixture
def supervisor(settings: Settings, database: Database) -> Iterator[Supervisor]:
    chosen = settings.model_copy(update={"poll_seconds": 0.05, "cpu_threads": 1, "heartbeat_seconds": 0.1})
    supervisor = Supervisor(chosen, database, on_cpu=True)
    yield supervisor
    end_all(supervisor)


def end_all(supervisor: Supervisor) -> None:
    """Kills what it runs, and waits until it is gone."""
    for running in (*supervisor.running, *supervisor.leaving):
        running.trainer.kill()
    until(lambda: all(running.trainer.status() is not None for running in supervisor.running))
    until(lambda: all(running.trainer.status() is not None for running in supervisor.leaving))


def endless(settings: Settings, database: Database) -> str:
    """A queued job on forty texts that would train for a long time; gives its id."""
    path = settings.files_dir / "file-1"
    if not path.exists():
        write_texts(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return submitted(database, make_spec(data=small_data(sha256=digest), max_steps=100_000))


def job(database: Database, job_id: str) -> Job:
    with database.reading() as session:
        return jobs.get(session, job_id)


def turn(supervisor: Supervisor) -> None:
    supervisor.turn()
    supervisor._claim_for_free_devices()


def test_a_trainer_does_not_outlive_its_lease_while_the_database_is_away(
    supervisor: Supervisor, settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    [running] = supervisor.running
    assert job(database, job_id).status == "running"

    @contextmanager
    def away() -> Iterator[None]:
        raise OperationalError("SELECT 1", {}, OSError("connection refused"))
        yield

    monkeypatch.setattr(database, "writing", away)
    supervisor.turn()
    assert running.trainer.status() is None
    running.lease_ends = 0.0
    supervisor.turn()
    assert supervisor.running == []
    until(lambda: running.trainer.status() is not None, 5)


def test_trouble_with_one_job_is_that_job_s_crash_and_not_the_worker_s(
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


def test_an_end_that_makes_no_sense_is_a_crash(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    [running] = supervisor.running
    running.trainer.kill()
    until(lambda: running.trainer.status() is not None, 5)
    (running.run.path / "failure.json").write_text("{")
    supervisor.turn()
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 1)


def test_a_resume_keeps_the_plan_on_a_device_alike(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    first = Plan.model_validate(job(database, job_id).plan)
    assert (first.predicted, first.threads) == (False, 1)
    fence = supervisor.running[0].fence
    with database.writing() as session:
        jobs.release(session, fence, "test")
    supervisor._next_beat = 0.0
    supervisor.turn()
    assert supervisor.running == []
    until(lambda: supervisor.turn() is None and not supervisor.leaving)  # type: ignore[func-returns-value]
    other = Supervisor(supervisor.settings.model_copy(update={"cpu_threads": 2}), database, on_cpu=True)
    other._claim_for_free_devices()
    assert Plan.model_validate(job(database, job_id).plan) == first
    assert job(database, job_id).attempt == 2
    end_all(other)


def test_a_stopped_supervisor_gives_its_jobs_back(
    supervisor: Supervisor, settings: Settings, database: Database
) -> None:
    job_id = endless(settings, database)
    turn(supervisor)
    supervisor.stop()
    supervisor.run()
    assert supervisor.running == []
    assert (job(database, job_id).status, job(database, job_id).failures) == ("queued", 0)
