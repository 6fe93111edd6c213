"""Backups under load, and what `accrue doctor` says."""

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

from app.datasets import content, files
from app.errors import BadSetting, InvalidRequest
from app.jobs import lifecycle, queue
from app.maintenance import backup, doctor
from app.maintenance.data_folder import DataFolderLock, held_by_worker, held_exclusively
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import File, Job
from tests.harness.submissions import submitted

pytestmark = pytest.mark.sqlite


def elsewhere(settings: Settings, folder: Path) -> Settings:
    return settings.model_copy(update={"data_dir": folder})


def test_a_backup_under_load_holds_every_job_acknowledged_before_it(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    (settings.files_dir / "file-1").write_text('{"text": "one"}\n')
    acknowledged = [submitted(database) for _ in range(20)]
    stopped = threading.Event()

    def write_on() -> None:
        while not stopped.is_set():
            job_id = submitted(database)
            with database.writing() as session:
                lifecycle.cancel(session, job_id)

    writers = [threading.Thread(target=write_on) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        taken = backup.take(settings, tmp_path / "backup", runs=True)
    finally:
        stopped.set()
        for writer in writers:
            writer.join()
    assert taken.jobs >= 20
    assert taken.files == 1
    assert sorted(path.name for path in taken.folder.iterdir()) == ["accrue.db", "files"]

    restored = elsewhere(settings, tmp_path / "restored")
    assert backup.restore(restored, taken.folder).jobs == taken.jobs
    other = Database(restored.resolved_database_url)
    with other.reading() as session:
        found = {job.id: job.status for job in session.scalars(select(Job))}
    assert set(acknowledged) <= set(found)
    assert all(found[job_id] == "queued" for job_id in acknowledged)
    assert set(found.values()) <= {"queued", "cancelled"}
    with other.writing() as session:
        fence = queue.claim(session, "worker-1", 15.0)
        assert fence is not None
        assert fence.job_id == acknowledged[0]
    assert (restored.files_dir / "file-1").exists()
    other.close()


def test_identical_files_share_one_copy_in_a_backup_and_after_a_restore(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    for number, text in enumerate(("same", "same", "other")):
        path = settings.files_dir / f"file-{number}"
        path.write_text(json.dumps({"text": text}) + "\n")
        checked = content.check(path, settings, "file")
        equal = files.find_duplicate(database, path, checked)
        with database.writing() as session:
            files.add(session, path, checked, filename="f.jsonl", purpose="fine-tune", duplicate_id=equal)
    taken = backup.take(settings, tmp_path / "backup", runs=False)
    restored = elsewhere(settings, tmp_path / "restored")
    assert backup.restore(restored, taken.folder).files == taken.files == 3
    for folder in (settings.files_dir, taken.folder / "files", restored.files_dir):
        assert [path.stat().st_nlink for path in sorted(folder.iterdir())] == [2, 2, 1]
    assert (restored.files_dir / "file-1").read_text() == '{"text": "same"}\n'


def stored_file(settings: Settings, database: Database, number: int) -> Path:
    path = settings.files_dir / f"file-{number}"
    path.write_text(json.dumps({"text": f"text {number}"}) + "\n")
    checked = content.check(path, settings, "file")
    with database.writing() as session:
        files.add(session, path, checked, filename="f.jsonl", purpose="fine-tune", duplicate_id=None)
    return path


def test_a_file_that_is_deleted_during_a_backup_is_not_in_it(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, deleted = stored_file(settings, database, 1), stored_file(settings, database, 2)
    copy = backup._copy_files

    def deleting(*arguments: Any) -> int:
        with database.writing() as session:
            session.execute(delete(File).where(File.id == deleted.name))
        deleted.unlink(missing_ok=True)
        return copy(*arguments)

    monkeypatch.setattr(backup, "_copy_files", deleting)
    taken = backup.take(settings, tmp_path / "a #1%20?b", runs=False)  # what a URL would cut off
    assert (taken.files, taken.lost) == (1, ())
    restored = elsewhere(settings, tmp_path / "restored #1%20?b")
    assert backup.restore(restored, taken.folder).files == 1
    assert [path.name for path in restored.files_dir.iterdir()] == [kept.name]
    assert not [path for path in tmp_path.iterdir() if path.name == ".a "]


def test_a_file_that_was_lost_before_does_not_spoil_a_backup(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    kept, lost = stored_file(settings, database, 1), stored_file(settings, database, 2)
    lost.unlink()
    taken = backup.take(settings, tmp_path / "backup", runs=False)
    assert (taken.files, taken.lost) == (1, (lost.name,))
    restored = backup.restore(elsewhere(settings, tmp_path / "restored"), taken.folder)
    assert (restored.files, restored.lost) == (1, (lost.name,))
    (taken.folder / "files" / kept.name).unlink()
    with pytest.raises(InvalidRequest, match="lacks files"):
        backup.restore(elsewhere(settings, tmp_path / "again"), taken.folder)


def test_failed_backups_and_restores_report_the_reason(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    submitted(database)
    (settings.files_dir / "file-1").write_text("{}")
    whole = backup.take(settings, tmp_path / "backup", runs=False).folder
    with pytest.raises(InvalidRequest, match="already exists"):
        backup.take(settings, tmp_path / "backup", runs=False)
    with pytest.raises(InvalidRequest, match="stop the service and the workers"):
        backup.restore(settings, whole)
    with pytest.raises(InvalidRequest, match="is not a backup"):
        backup.restore(elsewhere(settings, tmp_path / "other"), tmp_path)
    with pytest.raises(InvalidRequest, match="pg_dump"):
        backup.take(
            settings.model_copy(update={"database_url": "postgresql+psycopg:///x"}),
            tmp_path / "b",
            runs=False,
        )
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    content = bytearray((damaged / "accrue.db").read_bytes())
    content[4096:12288] = b"\xff" * 8192
    (damaged / "accrue.db").write_bytes(content)
    with pytest.raises(InvalidRequest, match="is damaged"):
        backup.restore(elsewhere(settings, tmp_path / "third"), damaged)
    lacking = tmp_path / "lacking"
    shutil.copytree(whole, lacking)
    (lacking / "files" / "file-1").unlink()
    with pytest.raises(InvalidRequest, match="lacks files"):
        backup.restore(elsewhere(settings, tmp_path / "fourth"), lacking)
    assert not (tmp_path / "fourth").exists()
    assert not list(tmp_path.glob(".backup*"))


def verdicts(settings: Settings) -> dict[str, str]:
    return {finding.what: finding.verdict for finding in doctor.examine(settings)}


def test_the_doctor_finds_what_is_wrong_and_changes_nothing(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (settings.models_dir or tmp_path).mkdir()
    found = verdicts(settings)
    assert "error" not in found.values()
    assert found["worker"] == "warning"
    assert found["database"] == found["data folder"] == found["models"] == "ok"
    nothing = elsewhere(settings, tmp_path / "nothing")
    assert "error" not in verdicts(nothing).values()
    assert verdicts(nothing)["data folder"] == verdicts(nothing)["database"] == "warning"
    assert not (tmp_path / "nothing").exists()
    assert verdicts(settings.model_copy(update={"models_dir": tmp_path / "no"}))["models"] == "error"
    away = settings.model_copy(update={"database_url": "postgresql+psycopg://nobody@127.0.0.1:9/x"})
    assert verdicts(away)["database"] == "error"
    (settings.data_dir).chmod(0o755)
    assert verdicts(settings)["data folder"] == "warning"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ((3, 40, 1), "warning"),
        ((3, 44, 6), "ok"),
        ((3, 50, 6), "warning"),
        ((3, 51, 3), "ok"),
        ((3, 53, 0), "ok"),
    ],
)
def test_sqlite_with_a_known_fault_is_named(version: tuple[int, int, int], verdict: str) -> None:
    assert doctor._sqlite_version(version).verdict == verdict


def test_nothing_is_restored_under_a_running_service_or_worker(
    settings: Settings, database: Database
) -> None:
    served = DataFolderLock(settings)
    with held_by_worker(settings):
        served.hold(database)  # both work in it at once
        served.release()
        with pytest.raises(BadSetting, match="a worker is running"), held_exclusively(settings):
            pass
    served.hold(database)
    with pytest.raises(BadSetting, match="a service is running"), held_exclusively(settings):
        pass
    served.release()
    with held_exclusively(settings):
        pass


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "newer version"),
        ("DROP TABLE files", "is damaged: no such table"),
    ],
)
def test_a_backup_of_another_version_is_refused_before_anything_is_written(
    settings: Settings, database: Database, tmp_path: Path, statement: str, reason: str
) -> None:
    submitted(database)
    (settings.files_dir / "file-1").write_text("{}")
    whole = backup.take(settings, tmp_path / "backup", runs=False).folder
    with contextlib.closing(sqlite3.connect(whole / "accrue.db")) as changed, changed:
        changed.execute(statement)
    other = elsewhere(settings, tmp_path / "other")
    for _ in range(2):  # a second attempt finds nothing that the first has left
        with pytest.raises(InvalidRequest, match=reason):
            backup.restore(other, whole)
    assert [path for path in tmp_path.glob("other/**/*") if path.is_file()] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_backup_with_a_pipe_is_refused(settings: Settings, database: Database, tmp_path: Path) -> None:
    submitted(database)
    (settings.files_dir / "file-1").write_text("{}")
    whole = backup.take(settings, tmp_path / "backup", runs=False).folder
    os.mkfifo(whole / "files" / "pipe")
    with pytest.raises(InvalidRequest, match="neither a file nor a folder"):
        backup.restore(elsewhere(settings, tmp_path / "other"), whole)


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_log_of_another_database_is_not_applied_to_a_restored_one(
    settings: Settings, database: Database, tmp_path: Path, suffix: str
) -> None:
    submitted(database)
    (settings.files_dir / "file-1").write_text("{}")
    whole = backup.take(settings, tmp_path / "backup", runs=False).folder
    other = elsewhere(settings, tmp_path / "other")
    other.make_directories()
    (other.data_dir / f"accrue.db{suffix}").write_bytes(b"of another database")
    with pytest.raises(InvalidRequest, match=f"accrue.db{suffix} exists already"):
        backup.restore(other, whole)


def test_a_checkpoint_that_is_replaced_during_a_backup_is_complete_in_it(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying takes longer here than the trainer keeps a checkpoint."""
    (settings.files_dir / "file-1").write_text("{}")
    job_id = submitted(database)
    folder = settings.runs_dir / job_id / "checkpoints"
    written = 0

    def advance() -> None:
        nonlocal written
        written += 1
        new = folder / f"step-{written:09d}"
        new.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors", "manifest.json"):
            (new / name).write_text(f"{written} {name}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
        (settings.runs_dir / job_id / "metrics.jsonl").write_text(f"{written}\n")

    for _ in range(3):
        advance()
    honest = backup._copy_plain

    def slowly(*arguments: Any) -> None:
        honest(*arguments)
        advance()

    monkeypatch.setattr(backup, "_copy_plain", slowly)
    taken = backup.take(settings, tmp_path / "backup", runs=True)
    run = taken.folder / "runs" / job_id
    found = sorted((run / "checkpoints").glob("step-*"))
    assert [path.name for path in found] == ["step-000000002", "step-000000003"]
    for path in found:
        number = int(path.name[5:])
        assert {file.name: file.read_text() for file in path.iterdir()} == {
            name: f"{number} {name}"
            for name in ("model.safetensors", "optimizer.safetensors", "manifest.json")
        }
    assert int((run / "metrics.jsonl").read_text()) >= 3  # the log reaches at least to the checkpoint
    assert not [*settings.copies_dir.glob("outgoing/*")]


def test_a_backup_is_not_mixed_with_newer_runs(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    (settings.files_dir / "file-1").write_text("{}")
    job_id = submitted(database)
    (settings.runs_dir / job_id / "checkpoints" / "step-000000001").mkdir(parents=True)
    (settings.runs_dir / job_id / "metrics.jsonl").write_text("old")
    taken = backup.take(settings, tmp_path / "backup", runs=True)
    restored = elsewhere(settings, tmp_path / "restored")
    (restored.runs_dir / job_id).mkdir(parents=True)
    (restored.runs_dir / job_id / "metrics.jsonl").write_text("new")
    with pytest.raises(InvalidRequest, match="may be newer than the backup"):
        backup.restore(restored, taken.folder)
    assert (restored.runs_dir / job_id / "metrics.jsonl").read_text() == "new"
    shutil.rmtree(restored.runs_dir)
    backup.restore(restored, taken.folder)
    assert (restored.runs_dir / job_id / "metrics.jsonl").read_text() == "old"


@pytest.mark.parametrize("has_links", [True, False])
def test_what_a_trainer_has_left_beside_its_checkpoints_does_not_spoil_a_backup(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    (settings.files_dir / "file-1").write_text("{}")
    job_id = submitted(database)
    run = settings.runs_dir / job_id
    for base in (run, run / "replica-1"):
        (base / "checkpoints" / "step-000000001").mkdir(parents=True)
        (base / "checkpoints" / "step-000000001" / "model.safetensors").write_text("weights")
        (base / "checkpoints" / "best").write_text("step-000000001")
        (base / "checkpoints" / "dangling").symlink_to("nowhere")
        os.mkfifo(base / "checkpoints" / "pipe")
    if not has_links:

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr("app.maintenance.backup.os.link", refused)
    taken = backup.take(settings, tmp_path / "backup", runs=True)
    for base in (taken.folder / "runs" / job_id, taken.folder / "runs" / job_id / "replica-1"):
        assert sorted(path.name for path in (base / "checkpoints").iterdir()) == ["best", "step-000000001"]
        assert (base / "checkpoints" / "step-000000001" / "model.safetensors").read_text() == "weights"


def test_a_restore_that_failed_can_be_repeated(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings.files_dir / "file-1").write_text("{}")
    for _ in range(2):
        (settings.runs_dir / submitted(database)).mkdir()
    taken = backup.take(settings, tmp_path / "backup", runs=True)
    restored = elsewhere(settings, tmp_path / "restored")
    honest, copied = shutil.copytree, list[Path]()

    def full(source: Path, target: Path, **options: Any) -> None:
        copied.append(target)
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(source, target, **options)

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="No space left"):
        backup.restore(restored, taken.folder)
    assert not any(path.exists() for path in copied)
    monkeypatch.setattr(shutil, "copytree", honest)
    assert backup.restore(restored, taken.folder).jobs == 2
