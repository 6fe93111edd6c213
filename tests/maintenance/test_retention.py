"""Deletion by age: ended jobs with everything that belongs to them, and files that no job needs."""

import time

import pytest
from sqlalchemy import func, select, update
from starlette.testclient import TestClient

from app.jobs import lifecycle
from app.main import create_app
from app.maintenance import retention
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import DeletedJob, File, Job, StepMetric
from tests.harness.log_lines import line
from tests.harness.runs import until
from tests.harness.submissions import submitted

DAY = 86400.0


def aged(database: Database, settings: Settings, days: float, status: str = "succeeded") -> str:
    job_id = submitted(database)
    with database.writing() as session:
        then = time.time() - days * DAY
        session.execute(update(Job).where(Job.id == job_id).values(status=status, finished_at=then))
    (settings.runs_dir / job_id / "model").mkdir(parents=True)
    return job_id


def uploaded(database: Database, settings: Settings, file_id: str, days: float) -> None:
    with database.writing() as session:
        session.add(
            File(
                id=file_id, created_at=time.time() - days * DAY, filename="f", purpose="fine-tune", bytes=1,
                sha256="0", format="text", examples=1, inline=False,
            )
        )  # fmt: skip
    (settings.files_dir / file_id).write_text("x")


def left(database: Database, settings: Settings) -> tuple[set[str], set[str]]:
    """Jobs in the database and run directories, which are the same; files likewise."""
    with database.reading() as session:
        job_ids = {row.id for row in session.query(Job)}
        file_ids = {row.id for row in session.query(File)}
    assert {path.name for path in settings.runs_dir.iterdir()} <= job_ids
    assert {path.name for path in settings.files_dir.iterdir()} <= file_ids
    return job_ids, file_ids


def test_old_jobs_are_deleted_with_their_files(database: Database, settings: Settings) -> None:
    old, young = aged(database, settings, 8), aged(database, settings, 6)
    waiting = aged(database, settings, 100, status="paused")
    uploaded(database, settings, "file-old", 8)
    uploaded(database, settings, "file-young", 6)
    assert retention.delete_expired(database, settings, 7) == 2
    assert left(database, settings) == ({young, waiting}, {"file-1", "file-young"})
    assert old not in {path.name for path in settings.runs_dir.iterdir()}
    assert retention.delete_expired(database, settings, 7) == 0


def test_a_file_is_deleted_after_the_last_job_that_uses_it(database: Database, settings: Settings) -> None:
    uploaded(database, settings, "file-needed", 30)
    job_id = aged(database, settings, 1)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(file_id="file-needed"))
    assert retention.delete_expired(database, settings, 7) == 1  # file-1, on which nobody trains any more
    assert left(database, settings) == ({job_id}, {"file-needed"})
    assert retention.delete_expired(database, settings, 0.5) == 2
    assert left(database, settings) == (set(), set())


@pytest.mark.parametrize("days", [None, 7.0])
def test_nothing_is_deleted_by_age_by_default(
    database: Database, settings: Settings, days: float | None
) -> None:
    job_id = aged(database, settings, 8)
    with TestClient(create_app(settings.model_copy(update={"retention_days": days}))):
        if days is not None:
            until(lambda: not any(settings.runs_dir.iterdir()), 10)  # which goes after its row
    assert (job_id in left(database, settings)[0]) == (days is None)


def record_steps(database: Database, job_id: str, count: int) -> None:
    with database.writing() as session:
        session.add_all(StepMetric(job_id=job_id, **line(step).model_dump()) for step in range(1, count + 1))


def steps_of(database: Database, job_id: str) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).where(StepMetric.job_id == job_id)) or 0


def test_many_steps_are_deleted_in_short_transactions(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "STEPS_AT_ONCE", 10)
    kept, short, long = (aged(database, settings, 1) for _ in range(3))
    for job_id, steps in ((kept, 15), (short, 9), (long, 35)):
        record_steps(database, job_id, steps)
    for job_id in (short, long):
        retention.delete_job(database, settings, job_id)
    assert [steps_of(database, job_id) for job_id in (kept, short, long)] == [15, 0, 25]
    assert left(database, settings)[0] == {kept}

    rows_left, remove_steps = [], lifecycle.remove_steps

    def watched(session: Session, job_id: str) -> bool:
        all_gone = remove_steps(session, job_id)
        rows_left.append(session.scalar(select(func.count()).where(StepMetric.job_id == job_id)))
        return all_gone

    monkeypatch.setattr(lifecycle, "remove_steps", watched)
    with TestClient(create_app(settings)):
        until(lambda: steps_of(database, long) == 0, 10)
    assert rows_left == [15, 5, 0]
    assert steps_of(database, kept) == 15
    with database.reading() as session:
        assert session.scalars(select(DeletedJob.id)).all() == []


@pytest.mark.sqlite
def test_deleted_content_is_overwritten_in_the_database_and_its_log(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_LOG_POLL_SECONDS", 0.1)
    marker = "a very secret label"
    files = [settings.data_dir / "accrue.db", settings.data_dir / "accrue.db-wal"]

    def is_on_disk() -> bool:
        return any(marker.encode() in path.read_bytes() for path in files if path.exists())

    with TestClient(create_app(settings), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client:
        body = {
            "model_name": "accrue/tiny-gpt2", "dataset_config": {"texts": ["a"]}, "auto_start": False,
            "metadata": {"label": marker},
        }  # fmt: skip
        path = "/gradient-accumulation/training"
        job = client.post(f"{path}/with-accumulation", json=body).json()
        assert is_on_disk()
        assert client.post(f"{path}/{job['id']}/cancel").status_code == 200
        assert client.delete(f"{path}/{job['id']}").status_code == 204
        until(lambda: not is_on_disk(), 20)
