"""Regression tests for the eighteenth attack. Those about files and columns are in
tests/datasets/test_file_types.py, those about deleted models in tests/acceptance/test_continuing.py."""

import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.contract.model_reference import ModelReference
from app.errors import Conflict, Unprocessable
from app.jobs import lifecycle, parent_jobs, transitions
from app.maintenance import retention
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.specs import make_spec
from tests.harness.submissions import started_from, succeeded
from workers.training.checks.loss_checks import final_failures
from workers.training.distributed.group import ALONE
from workers.training.exceptions import CannotTrain

ROOT = "/gradient-accumulation"


def test_a_pipe_in_place_of_a_config_blocks_no_thread(
    client: TestClient, database: Database, settings: Settings
) -> None:
    job_id, folder = succeeded(database, settings)
    os.mkfifo(folder / "config.json")
    answer = client.get(f"{ROOT}/performance/recommendations", params={"model_name": job_id})
    assert answer.status_code == 422
    assert "has no config.json" in answer.json()["detail"]


def test_links_in_a_trained_model_s_folder_are_not_followed(
    client: TestClient, database: Database, settings: Settings, tmp_path: Path
) -> None:
    job_id, folder = succeeded(database, settings)
    (tmp_path / "other.json").write_text("{}")
    (folder / "config.json").symlink_to(tmp_path / "other.json")
    body = {"model_name": job_id, "dataset_config": {"texts": ["a"]}}
    answer = client.post(f"{ROOT}/training/with-accumulation", json=body)
    assert answer.status_code == 422


def test_a_job_that_an_unfinished_one_starts_from_stays(database: Database, settings: Settings) -> None:
    source, _ = succeeded(database, settings)
    dependent = started_from(database, source)
    with pytest.raises(Conflict, match=dependent), database.writing() as session:
        lifecycle.remove(session, source)
    with database.writing() as session:
        lifecycle.cancel(session, dependent)
    with database.writing() as session:
        lifecycle.remove(session, source)
    with database.writing() as session:
        model = ModelReference.model_validate(transitions.get(session, dependent).spec["model"])
        spec = make_spec(model=model)
        with pytest.raises(Unprocessable, match="has been deleted"):
            parent_jobs.lock(session, spec)


@pytest.mark.thorough
def test_many_large_rows_of_a_parquet_file_are_read(client: TestClient) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 300_000]))
    content = io.BytesIO()
    pq.write_table(pa.table({"text": column}), content, compression="zstd")
    answer = client.post(
        "/v1/files", files={"file": ("a.parquet", content.getvalue())}, data={"purpose": "fine-tune"}
    )
    assert answer.json()["examples"] == 1000


@pytest.mark.parametrize(
    "text", ["CUBLAS_STATUS_ALLOC_FAILED when calling", "std::bad_alloc", "can't start new thread",
             "unable to open shared memory object </torch_1> Too many open files"],
)  # fmt: skip
def test_an_error_of_the_machine_is_not_final(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"CUBLAS|bad_alloc|thread|memory"), final_failures(ALONE):
        raise RuntimeError(text)
    with pytest.raises(CannotTrain, match="the model fails"), final_failures(ALONE):
        raise RuntimeError("shapes (3, 4) and (5, 6) cannot be multiplied")


def test_deletion_by_age_leaves_what_unfinished_jobs_start_from(
    database: Database, settings: Settings
) -> None:
    source, _ = succeeded(database, settings)
    with database.writing() as session:
        session.get_one(Job, source).finished_at = 1.0
    dependent = started_from(database, source)
    assert retention.delete_expired(database, settings, days=1) == 0
    with database.writing() as session:
        lifecycle.cancel(session, dependent)
    assert retention.delete_expired(database, settings, days=1) == 1
