"""Files of other machines: two data folders over one object storage."""

import os
import time
from pathlib import Path

import pytest

from app.errors import Unavailable
from app.maintenance import retention
from app.maintenance.data_folder import clean
from app.models import base_models
from app.results import run_files
from app.settings import Settings
from app.storage import stored_files, unsettled_files
from app.storage.database import Database
from app.storage.objects import Manifest, ObjectStorage, object_storage
from app.storage.tables import Job
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted
from workers.disk_cleaner import DiskCleaner
from workers.run_directory import RunDirectory
from workers.run_upload import RunUpload

JOB = "ftjob-1"


@pytest.fixture
def here(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"object_storage": f"file://{tmp_path}/bucket"})


@pytest.fixture
def there(here: Settings, tmp_path: Path) -> Settings:
    other = here.model_copy(update={"data_dir": tmp_path / "there"})
    other.make_directories()
    return other


@pytest.fixture
def storage(here: Settings) -> ObjectStorage:
    found = object_storage(here)
    assert found is not None
    return found


def trained(machine: Settings, storage: ObjectStorage, attempt: int, text: str, job_id: str = JOB) -> None:
    """A machine has worked on a job, which has a model now."""
    run = RunDirectory(machine.runs_dir / job_id)
    run.model.mkdir(parents=True, exist_ok=True)
    (run.path / "spec.json").write_text(f'{{"attempt": {attempt}}}')
    (run.path / "completions.json").write_text('{"data": []}')
    (run.path / "outcome.json").write_text("{}")
    (run.model / "config.json").write_text(text)
    (run.checkpoints / f"step-{attempt}").mkdir(parents=True)
    (run.checkpoints / f"step-{attempt}" / "state").write_text(text)
    upload = RunUpload(run, stored_files.stored_run(storage, job_id), machine, attempt, 10)
    upload.finish()
    upload._thread.join(30)
    assert upload.finish()


def test_a_model_is_read_where_the_newest_attempt_has_put_it(
    here: Settings, there: Settings, storage: ObjectStorage
) -> None:
    trained(here, storage, 1, "first")
    assert run_files.model_dir(here, JOB) == here.runs_dir / JOB / "model"
    assert (run_files.model_dir(there, JOB) / "config.json").read_text() == "first"
    trained(there, storage, 2, "second")
    assert (run_files.model_dir(here, JOB) / "config.json").read_text() == "second"
    assert run_files.model_dir(there, JOB) == there.runs_dir / JOB / "model"
    assert stored_files.checkpoint_names(here, JOB) == {"step-2"}
    assert stored_files.checkpoint_names(there, JOB) == {"step-2"}
    spec = make_spec()
    model = spec.model.model_copy(update={"source": "job", "job_id": JOB})
    assert (Path(base_models.path_of(model, here)) / "config.json").read_text() == "second"
    files = run_files.model_files(here, JOB, ["config.json"])
    assert files is not None
    assert files["config.json"].read() == b"second"
    run_files.close(files)


def test_a_file_is_fetched_where_it_was_not_uploaded(here: Settings, there: Settings) -> None:
    (here.files_dir / "file-1").write_text("samples")
    stored_files.store_file(here, here.files_dir / "file-1")
    assert stored_files.path_of_file(here, "file-1") == here.files_dir / "file-1"
    assert stored_files.path_of_file(there, "file-1").read_text() == "samples"
    assert not stored_files.path_of_file(there, "file-2").exists()
    assert stored_files.remove_file(here, "file-1")
    assert not stored_files.path_of_file(here, "file-1").exists()


def test_a_damaged_object_is_reported_with_what_to_do(
    here: Settings, there: Settings, tmp_path: Path
) -> None:
    (here.files_dir / "file-1").write_text("samples")
    stored_files.store_file(here, here.files_dir / "file-1")
    [content] = (tmp_path / "bucket").rglob("content")
    content.write_text("changed")
    with pytest.raises(Unavailable, match=r"file-1.*is damaged"):
        stored_files.path_of_file(there, "file-1")


def test_a_deleted_job_is_deleted_from_the_storage(
    here: Settings, there: Settings, storage: ObjectStorage, database: Database
) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        job = session.get(Job, job_id)
        assert job is not None
        job.status = "succeeded"
    trained(there, storage, 1, "model", job_id)
    (here.files_dir / "file-1").write_text("samples")
    stored_files.store_file(here, here.files_dir / "file-1")
    run_files.model_dir(here, job_id)
    retention.delete_job(database, here, job_id)
    assert storage.below("runs") == storage.below("files") == []
    assert not (here.copies_dir / "runs" / job_id).exists()
    assert unsettled_files.marked(here.files_dir) == unsettled_files.marked(here.runs_dir) == []


def test_a_deleted_model_leaves_the_checkpoints(
    here: Settings, there: Settings, storage: ObjectStorage
) -> None:
    trained(there, storage, 1, "model")
    storage.write(f"exports/{JOB}/export-1/000001.000001.json", b"{}")
    assert run_files.model_dir(here, JOB).is_dir()
    run_files.remove_models(here, JOB)
    assert not run_files.model_dir(here, JOB).exists()
    assert stored_files.checkpoint_names(here, JOB) == {"step-1"}
    assert not [key for key in storage.below("") if "model" in key or "exports" in key]


def test_what_the_storage_could_not_delete_is_deleted_at_the_next_start(
    here: Settings, storage: ObjectStorage, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        job = session.get(Job, job_id)
        assert job is not None
        job.status = "succeeded"
    trained(here, storage, 1, "model", job_id)

    def unavailable(self: ObjectStorage, folder: str) -> None:
        raise Unavailable("it does not answer")

    with monkeypatch.context() as away:
        away.setattr(ObjectStorage, "delete_folder", unavailable)
        retention.delete_job(database, here, job_id)
    assert unsettled_files.marked(here.runs_dir) == [job_id]
    assert storage.below("runs")
    clean(database, here)
    assert unsettled_files.marked(here.runs_dir) == []
    assert storage.below("runs") == []


def test_a_machine_deletes_what_it_no_longer_needs(
    here: Settings, there: Settings, storage: ObjectStorage, database: Database
) -> None:
    for job_id in ("ftjob-kept", "ftjob-moved", "ftjob-deleted", "ftjob-runs"):
        trained(here, storage, 1, "1", job_id)
    RunDirectory(here.runs_dir / "ftjob-never-stored").path.mkdir()
    trained(there, storage, 2, "2", "ftjob-moved")
    trained(there, storage, 2, "2", "ftjob-runs")
    stored_files.stored_run(storage, "ftjob-deleted").delete()
    DiskCleaner(here, database, lambda: {"ftjob-runs"}).clean()
    left = {path.name for path in here.runs_dir.iterdir()}
    assert left == {"ftjob-kept", "ftjob-runs", "ftjob-never-stored"}


def test_a_machine_keeps_what_a_storage_that_looks_empty_may_have(
    here: Settings, storage: ObjectStorage, database: Database, tmp_path: Path
) -> None:
    job_id = submitted(database)
    trained(here, storage, 1, "1", job_id)
    trained(here, storage, 1, "1", "ftjob-damaged")
    [manifest] = (tmp_path / "bucket/runs/ftjob-damaged").glob("*.json")
    manifest.write_text("{")
    DiskCleaner(here, database, set).clean()
    (tmp_path / "bucket").rename(tmp_path / "unmounted")
    DiskCleaner(here, database, set).clean()
    left = {path.name for path in here.runs_dir.iterdir()}
    assert job_id in left  # its row says that it exists


def test_unused_copies_are_deleted(here: Settings, there: Settings, storage: ObjectStorage) -> None:
    trained(there, storage, 1, "1")
    copy = run_files.model_dir(here, JOB)
    run_files.completions(here, JOB)
    assert stored_files.remove_unused(here, 60) == []
    week_ago = time.time() - 7 * 86400
    os.utime(copy.parent.with_name("model.lock"), (week_ago, week_ago))
    assert stored_files.remove_unused(here, 3600) == [copy.parent]
    assert not copy.exists()
    assert run_files.model_dir(here, JOB).is_dir()


def test_a_manifest_names_its_version() -> None:
    assert Manifest(attempt=2, number=30, files={}).name == "000002.000030.json"
