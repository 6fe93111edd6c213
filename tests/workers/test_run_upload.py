"""Run directories on their way into object storage, while they change."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.contract.regular_files import NotRegular
from app.errors import Unavailable
from app.jobs.transitions import Fence
from app.settings import Settings
from app.storage.disk import remove_tree
from app.storage.objects import Manifest, ObjectStorage, StoredFolder
from app.storage.stored_files import attempt_of_run
from tests.harness.runs import until
from workers import run_upload
from workers.job_inputs import Inputs, PendingTrainer, fetch_run
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.run_upload import RunUpload

JOB = "ftjob-1"


@pytest.fixture
def storage(tmp_path: Path) -> ObjectStorage:
    return ObjectStorage(f"file://{tmp_path}/bucket")


@pytest.fixture
def stored(storage: ObjectStorage) -> StoredFolder:
    return StoredFolder(storage, f"runs/{JOB}")


@pytest.fixture
def run(settings: Settings) -> RunDirectory:
    run = RunDirectory(settings.runs_dir / JOB)
    checkpoint = run.checkpoints / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("2")
    run.metrics.write_text('{"step":1}\n')
    return run


@pytest.fixture
def upload(settings: Settings, run: RunDirectory, stored: StoredFolder) -> Iterator[RunUpload]:
    upload = RunUpload(run, stored, settings, 1, 1.0)
    yield upload
    upload.cancel()


def uploaded(stored: StoredFolder, number: int) -> Manifest:
    """The version with that number, once it is there."""
    until(lambda: (newest := stored.newest()) is not None and newest.number >= number)
    newest = stored.newest()
    assert newest is not None
    return newest


def test_only_what_has_changed_is_stored_again(
    run: RunDirectory, upload: RunUpload, stored: StoredFolder
) -> None:
    upload.request()
    first = uploaded(stored, 1)
    assert set(first.files) == {"checkpoints/step-00000002/state.json", "metrics.jsonl"}
    with run.metrics.open("a") as log:
        log.write('{"step":2}\n')
    upload.request()
    second = uploaded(stored, 2)
    checkpoint = "checkpoints/step-00000002/state.json"
    assert second.files[checkpoint] == first.files[checkpoint]
    assert second.files["metrics.jsonl"].bytes == len('{"step":1}\n') * 2
    assert run.stored_in() == "None"


def test_the_last_version_has_the_results(run: RunDirectory, upload: RunUpload, stored: StoredFolder) -> None:
    run.model.mkdir()
    (run.model / "model.safetensors").write_text("weights")
    (run.path / "replica-0" / "model").mkdir(parents=True)
    (run.path / "replica-0" / "model" / "config.json").write_text("{}")
    upload.request()
    assert "model/model.safetensors" not in uploaded(stored, 1).files
    until(upload.finish)
    assert {"model/model.safetensors", "replica-0/model/config.json"} <= uploaded(stored, 2).files.keys()
    assert upload.failed_because is None


def test_links_and_pipes_of_a_trainer_are_left_out(
    run: RunDirectory, upload: RunUpload, stored: StoredFolder
) -> None:
    run.model.mkdir()
    (run.model / "passwd").symlink_to("/etc/passwd")
    (run.model / "folder").symlink_to("/etc")
    os.mkfifo(run.model / "pipe")
    run.events.symlink_to("/etc/passwd")
    (run.path / "profile").symlink_to("/etc")
    until(upload.finish)
    assert set(uploaded(stored, 1).files) == {"checkpoints/step-00000002/state.json", "metrics.jsonl"}


def test_a_checkpoint_that_is_deleted_while_it_is_stored_is_stored_completely(
    run: RunDirectory, upload: RunUpload, stored: StoredFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StoredFolder.store

    def deleting(self: StoredFolder, *rest: object, **more: int) -> object:
        remove_tree(run.checkpoints, "step-00000002")
        return plain(self, *rest, **more)  # type: ignore[arg-type]

    (run.checkpoints / "step-00000002" / "weights").write_text("2")
    monkeypatch.setattr(StoredFolder, "store", deleting)
    upload.request()
    files = uploaded(stored, 1).files
    assert {"checkpoints/step-00000002/state.json", "checkpoints/step-00000002/weights"} <= files.keys()
    upload.request()
    assert set(uploaded(stored, 2).files) == {"metrics.jsonl"}


def test_names_that_no_storage_could_have_are_left_out(
    run: RunDirectory, upload: RunUpload, stored: StoredFolder
) -> None:
    run.model.mkdir()
    for name in (b"back\\slash", b"\xff\xfe", b"line\nbreak"):
        (run.model / os.fsdecode(name)).write_text("x")
    deep = run.model
    for _ in range(3):
        deep /= "y" * 200
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (run.model / ("z" * 250)).write_text("kept")
    until(upload.finish)
    assert [path for path in uploaded(stored, 1).files if path.startswith("model")] == [f"model/{'z' * 250}"]
    stored.fetch(run.path.parent / "copy")
    assert (run.path.parent / "copy" / "model" / ("z" * 250)).read_text() == "kept"


def test_a_lock_that_is_a_link_or_a_pipe_is_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("content")
    lock = run.path / "lock"
    lock.symlink_to(tmp_path / "victim")
    with pytest.raises(NotRegular), run.locked(0):
        pass
    assert (tmp_path / "victim").read_text() == "content"
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(NotRegular), run.locked(0):
        pass


def test_versions_of_a_restored_database_follow_those_in_the_storage(
    settings: Settings, storage: ObjectStorage, stored: StoredFolder, run: RunDirectory
) -> None:
    wait_for(RunUpload(run, stored, settings, 9, 10))
    assert fetch_run(settings, storage, Fence(JOB, 2, "worker-1"), lambda: False) == 10
    assert fetch_run(settings, storage, Fence(JOB, 12, "worker-1"), lambda: False) == 12


def test_storage_that_fails_is_tried_again(
    upload: RunUpload, stored: StoredFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_upload, "_RETRY_SECONDS", 0.01)
    plain, left = StoredFolder.publish, iter([1, 1, 0, 0])

    def failing(self: StoredFolder, manifest: Manifest) -> None:
        if next(left, 0):
            raise Unavailable("it does not answer")
        plain(self, manifest)

    monkeypatch.setattr(StoredFolder, "publish", failing)
    upload.request()
    assert uploaded(stored, 1).number == 3


def test_a_last_upload_that_fails_for_good_is_reported(
    upload: RunUpload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: StoredFolder, manifest: Manifest) -> None:
        raise Unavailable("it does not answer")

    monkeypatch.setattr(run_upload, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(StoredFolder, "publish", failing)
    until(upload.finish)
    assert upload.failed_because is not None


def test_a_cancelled_upload_publishes_nothing(
    upload: RunUpload, stored: StoredFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StoredFolder.store

    def cancelling(self: StoredFolder, *rest: object, **more: int) -> object:
        upload.cancel()
        return plain(self, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredFolder, "store", cancelling)
    upload.request()
    upload._thread.join(10)
    assert stored.newest() is None


def worked_on(run: RunDirectory, attempt: int) -> None:
    (run.path / "spec.json").write_text(f'{{"attempt": {attempt}}}')


def wait_for(upload: RunUpload) -> None:
    until(upload.finish)


@pytest.mark.parametrize(
    ("own", "expected"),
    [(0, "elsewhere"), (1, "elsewhere"), (2, "here"), (3, "here")],
)
def test_a_run_directory_is_fetched_if_another_machine_has_worked_on_it_since(
    settings: Settings,
    storage: ObjectStorage,
    stored: StoredFolder,
    run: RunDirectory,
    own: int,
    expected: str,
) -> None:
    """The job's third attempt ended elsewhere as the second's state, or was made here."""
    run.metrics.write_text("elsewhere")
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    wait_for(RunUpload(run, stored, settings, 2, 10))
    run.metrics.write_text("here")
    if own:
        worked_on(run, own)
    fetch_run(settings, storage, Fence(JOB, 4, "worker-1"), lambda: False)
    assert run.metrics.read_text() == expected
    assert (run.checkpoints / "step-00000002" / "state.json").read_text() == "2"
    assert run.model.exists() == (expected == "here")
    assert not list((settings.copies_dir / "incoming").glob("*"))


def test_a_fetch_that_is_no_longer_needed_changes_nothing(
    settings: Settings, storage: ObjectStorage, stored: StoredFolder, run: RunDirectory
) -> None:
    run.metrics.write_text("elsewhere")
    wait_for(RunUpload(run, stored, settings, 2, 10))
    run.metrics.write_text("here")
    fetch_run(settings, storage, Fence(JOB, 4, "worker-1"), lambda: True)
    assert run.metrics.read_text() == "here"


def test_events_continue_after_those_of_another_machine(run: RunDirectory) -> None:
    run.events.write_text('{"a":1}\n')
    run.continue_events_after(40)
    assert run.events.stat().st_size == 41
    run.continue_events_after(20)
    run.continue_events_after(-1)
    assert run.events.stat().st_size == 41


def test_a_trainer_that_is_not_started_yet_can_be_interrupted() -> None:
    inputs = Inputs("data", None, "model", ())
    waits = PendingTrainer(lambda is_cancelled: inputs)
    until(lambda: waits.inputs is inputs)
    assert waits.is_waiting
    assert waits.status() is None
    waits.interrupt(1)
    assert waits.status() == INTERRUPTED
    assert not waits.is_waiting
    killed = PendingTrainer(lambda is_cancelled: inputs)
    killed.kill()
    assert (killed.status() or 0) < 0


def test_the_attempt_of_a_run_directory(run: RunDirectory) -> None:
    assert attempt_of_run(run.path) == 0
    for text in ("", "[]", '{"attempt": null}'):
        (run.path / "spec.json").write_text(text)
        assert attempt_of_run(run.path) == 0
    worked_on(run, 7)
    assert attempt_of_run(run.path) == 7
