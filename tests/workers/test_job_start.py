"""Jobs whose files are in object storage, from their claim to their trainer, and at their end."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.contract.reports import Outcome
from app.errors import Unavailable
from app.jobs import transitions
from app.jobs.transitions import Fence
from app.planning.devices import Device
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.objects import ObjectStorage, StoredFolder
from app.storage.tables import Job
from tests.harness.claims import claim
from tests.harness.runs import small_data, until
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted
from workers import job_measurements
from workers.job_end import end_job
from workers.job_inputs import PendingTrainer
from workers.job_start import JobStart
from workers.leases import Running
from workers.run_directory import RunDirectory
from workers.trainer_launcher import TrainerLauncher

CPU = Device(id=0, name="CPU", kind="cpu", memory_bytes=2**33)


@pytest.fixture
def machine(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"object_storage": f"file://{tmp_path}/bucket"})


@pytest.fixture
def start(machine: Settings, database: Database) -> JobStart:
    return JobStart(machine, database, TrainerLauncher(machine, database))


def begun(start: JobStart, database: Database) -> tuple[Fence, Running]:
    """A claimed job that is being fetched."""
    submitted(database, make_spec(data=small_data(sha256="0")))
    fence = claim(database)
    assert fence is not None
    running = start.begin(job(database, fence.job_id), fence, (CPU,), time.monotonic(), [])
    assert running is not None
    assert isinstance(running.trainer, PendingTrainer)
    return fence, running


def fetched(running: Running) -> PendingTrainer:
    trainer = running.trainer
    assert isinstance(trainer, PendingTrainer)
    until(lambda: trainer.inputs is not None or trainer.error is not None)
    return trainer


def job(database: Database, job_id: str) -> Job:
    with database.reading() as session:
        return transitions.get(session, job_id)


def test_a_job_waits_while_the_storage_cannot_be_used(
    start: JobStart, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(self: ObjectStorage, folder: str) -> list[str]:
        raise Unavailable("it does not answer")

    monkeypatch.setattr(ObjectStorage, "names", unavailable)
    fence, running = begun(start, database)
    assert start.go_on(running, fetched(running)) is None
    found = job(database, fence.job_id)
    assert (found.status, found.failures) == ("queued", 0)
    assert claim(database) is None  # it waits a while


def test_an_attempt_whose_objects_are_damaged_counts_as_failed(
    start: JobStart, database: Database, machine: Settings, tmp_path: Path
) -> None:
    (machine.files_dir / "file-1").write_text("samples")
    stored_files.store_file(machine, machine.files_dir / "file-1")
    (machine.files_dir / "file-1").unlink()
    [content] = (tmp_path / "bucket").rglob("content")
    content.unlink()
    fence, running = begun(start, database)
    trainer = fetched(running)
    assert isinstance(trainer.error, Unavailable)
    assert "are missing" in trainer.error.message
    assert start.go_on(running, trainer) is None
    found = job(database, fence.job_id)
    assert (found.status, found.failures) == ("queued", 1)


def test_a_job_is_interrupted_while_it_is_fetched(
    start: JobStart, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, running = begun(start, database)
    running.trainer.interrupt(1)
    running.interrupted_because = "the worker was shut down"
    assert start.go_on(running, fetched(running)) is None
    found = job(database, fence.job_id)
    assert (found.status, found.failures) == ("queued", 0)


def test_a_job_that_is_still_being_fetched_goes_on(
    start: JobStart, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: StoredFolder) -> None:
        time.sleep(0.3)

    monkeypatch.setattr(StoredFolder, "newest", slow)
    _, running = begun(start, database)
    assert isinstance(running.trainer, PendingTrainer)
    assert start.go_on(running, running.trainer) is running
    assert running.trainer.is_waiting
    fetched(running)


@pytest.mark.parametrize("failed", [None, "the files cannot be put into the object storage"])
def test_a_job_succeeds_only_once_its_files_are_stored(
    start: JobStart,
    database: Database,
    machine: Settings,
    monkeypatch: pytest.MonkeyPatch,
    failed: str | None,
) -> None:
    monkeypatch.setattr(job_measurements, "store_run", lambda *_: None)
    fence, running = begun(start, database)
    outcome = Outcome.model_construct(steps=0)
    monkeypatch.setattr(RunDirectory, "outcome", lambda self: outcome)
    running.upload = SimpleNamespace(failed_because=failed)  # type: ignore[assignment]
    with database.writing() as session:
        end_job(session, running, 0, machine, worker_is_stopping=False)
    assert job(database, fence.job_id).status == ("queued" if failed else "succeeded")


@pytest.mark.parametrize("place", ["model", "checkpoints", "exports"])
def test_a_job_that_left_a_link_in_place_of_a_folder_fails(
    start: JobStart, database: Database, machine: Settings, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(job_measurements, "store_run", lambda *_: None)
    fence, running = begun(start, database)
    monkeypatch.setattr(RunDirectory, "outcome", lambda self: Outcome.model_construct(steps=0))
    running.run.path.mkdir(parents=True, exist_ok=True)
    (running.run.path / place).symlink_to(machine.data_dir)
    with database.writing() as session:
        end_job(session, running, 0, machine, worker_is_stopping=False)
    ended = job(database, fence.job_id)
    assert (ended.status, ended.error["code"]) == ("failed", "run_damaged")
