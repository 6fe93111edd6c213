"""Exports as rows: claimed by one process, renewed, ended, and tried again after a crash."""

from typing import Any

import pytest
from sqlalchemy import update

from app.contract.export import ExportedFile, ExportOrder, ExportResult
from app.errors import Conflict
from app.exports import requests
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import Export, Job, Worker
from tests.harness.specs import make_spec
from tests.harness.submissions import succeeded


def order(**changes: Any) -> ExportOrder:
    spec = make_spec()
    fields = {"model": spec.model, "quantised_base": False, "name": "ft:x", "format": "merged", "type": None,
              "data": spec.data, "data_file": "file-1", "seed": 1}  # fmt: skip
    return ExportOrder.model_validate({**fields, **changes})


@pytest.fixture
def job_id(database: Database, settings: Settings) -> str:
    """A job with a model, and a worker that is alive."""
    found, _ = succeeded(database, settings)
    with database.writing() as session:
        worker = {"hostname": "h", "started_at": database_now(), "devices": [], "running": []}
        session.add(Worker(id="worker-1", heartbeat_at=database_now(), **worker))
    return found


def added(database: Database, job_id: str) -> str:
    with database.writing() as session:
        return requests.add(session, job_id, order()).id


def claimed(database: Database, process: str = "p") -> requests.Claimed | None:
    with database.writing() as session:
        return requests.claim(session, process)


def status_of(database: Database, export_id: str) -> str:
    with database.reading() as session:
        return session.get_one(Export, export_id).status


def _silent(database: Database) -> None:
    with database.writing() as session:
        session.execute(update(Export).values(claimed_at=database_now() - requests.CLAIM_SECONDS - 1))


def test_keys_take_turns(database: Database, settings: Settings, job_id: str) -> None:
    other, _ = succeeded(database, settings)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == other).values(owner="key-b"))
    of_one = [added(database, job_id) for _ in range(3)]
    of_other = [added(database, other) for _ in range(2)]
    made: list[str] = []
    for _ in range(5):
        found = claimed(database)
        assert found is not None
        made.append(found.id)
        with database.writing() as session:  # the clock moves on
            session.execute(update(Export).values(claimed_at=Export.claimed_at - 1.0))
    assert made == [of_one[0], of_other[0], of_one[1], of_other[1], of_one[2]]


def test_an_export_is_claimed_once_oldest_first(database: Database, job_id: str) -> None:
    first, second = added(database, job_id), added(database, job_id)
    found = claimed(database)
    assert found is not None
    assert (found.id, found.job_id, found.attempts) == (first, job_id, 1)
    assert ExportOrder.model_validate(found.order) == order()
    other = claimed(database, "q")
    assert other is not None
    assert other.id == second
    assert claimed(database) is None


def test_a_silent_process_loses_its_export(database: Database, job_id: str) -> None:
    export_id = added(database, job_id)
    claimed(database)
    _silent(database)
    again = claimed(database, "q")
    assert again is not None
    assert (again.id, again.attempts) == (export_id, 2)
    with database.writing() as session:
        assert not requests.renew(session, "p", export_id)
        assert not requests.finish(session, "p", export_id, ExportResult(error="too late"))
        assert requests.renew(session, "q", export_id)
        assert requests.finish(
            session, "q", export_id, ExportResult(files=(ExportedFile(name="a", bytes=1),))
        )
    assert status_of(database, export_id) == "succeeded"


def test_an_export_that_was_released_is_free_at_once(database: Database, job_id: str) -> None:
    export_id = added(database, job_id)
    claimed(database)
    with database.writing() as session:
        requests.release(session, "p", export_id)
    again = claimed(database, "q")
    assert again is not None
    assert again.attempts == 1


def test_a_failed_export_says_why(database: Database, job_id: str) -> None:
    export_id = added(database, job_id)
    claimed(database)
    with database.writing() as session:
        requests.finish(session, "p", export_id, ExportResult(error="no\x00 memory"))
    with database.reading() as session:
        export = session.get_one(Export, export_id)
        assert (export.status, export.error) == ("failed", "no\N{REPLACEMENT CHARACTER} memory")
        assert not requests.any_unclaimed(session)


def test_without_a_worker_nothing_is_stored(database: Database, settings: Settings) -> None:
    job_id, _ = succeeded(database, settings)
    with pytest.raises(Conflict, match="accrue worker"):
        added(database, job_id)


def test_a_job_has_at_most_twenty_exports(database: Database, job_id: str) -> None:
    for _ in range(requests.MAX_KEPT):
        added(database, job_id)
    with pytest.raises(Conflict, match="delete some"):
        added(database, job_id)


def test_exports_and_their_files_end_with_them(database: Database, settings: Settings, job_id: str) -> None:
    export_id = added(database, job_id)
    folder = requests.folder_of(settings, job_id, export_id, 1)
    folder.mkdir(parents=True)
    requests.remove(database, settings, job_id, export_id)
    assert not folder.exists()
    kept = added(database, job_id)
    with database.writing() as session:
        session.delete(session.get_one(Job, job_id))
    with database.reading() as session:
        assert session.get(Export, kept) is None
