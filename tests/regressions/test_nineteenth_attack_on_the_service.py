"""Regression tests for the nineteenth attack, on the service. Those about the hub are in
test_hostile_hub.py."""

import io
import json
import math
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.errors import Conflict, Unprocessable
from app.jobs import lifecycle
from app.planning.devices import Device
from app.planning.duration import MeasuredWork, Work, fitted
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Viewer
from app.storage.tables import Job
from tests.harness.submissions import started_from, succeeded


def upload(client: TestClient, name: str, content: bytes) -> Any:
    return client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"}).json()


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "after", ['\n[{"text":"b"},{"text":"c"}]', '\n{"text":"b"}', "xxx", "]", f"{' ' * 10_000}[1]", ",", "\0"]
)
def test_nothing_may_follow_an_array(client: TestClient, after: str) -> None:
    answer = upload(client, "a.json", f'[{{"text":"a"}}]{after}'.encode())
    assert "Not valid JSON after row 1" in answer["detail"]
    assert upload(client, "a.json", b'[{"text":"a"}] \n\t ')["examples"] == 1


@pytest.mark.sqlite
def test_an_object_with_several_lists_of_samples_is_refused(client: TestClient) -> None:
    content = json.dumps({"data": [{"text": "a"}], "train": [{"text": "b"}]}).encode()
    assert "several lists of samples (data, train)" in upload(client, "a.json", content)["detail"]


TIME = pa.timestamp("ns")
TIMES = [
    pa.array([1], pa.timestamp("ns")), pa.array([2**62], pa.timestamp("ms")), pa.array([1], pa.time64("ns")),
    pa.array([1], pa.duration("ns")), pa.array([2**30], pa.date32()), pa.array([2**60], pa.date64()),
    pa.array([1], pa.timestamp("us", tz="Europe/Berlin")),
    pa.array([[1]], pa.list_(pa.timestamp("ns"))), pa.array([[1, 2]], pa.list_(pa.time64("ns"), 2)),
    pa.array([[2**30]], pa.large_list(pa.date32())), pa.array([[(1, 2)]], pa.map_(TIME, pa.duration("ns"))),
    pa.array([{"a": [{"b": 1}]}], pa.struct([("a", pa.list_(pa.struct([("b", TIME)])))])),
    pa.array([1], TIME).dictionary_encode(),
]  # fmt: skip


@pytest.mark.sqlite
@pytest.mark.parametrize("times", TIMES, ids=lambda each: str(each.type))
def test_times_that_python_has_not_do_not_end_a_conversion(client: TestClient, times: Any) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"], "at": times}), file)
    answer = upload(client, "a.parquet", file.getvalue())
    assert answer.get("examples") == 1, answer


@pytest.mark.sqlite
def test_text_that_is_not_utf8_in_parquet_is_named_so(client: TestClient) -> None:
    file = io.BytesIO()
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xff")]
    )
    pq.write_table(pa.table({"text": broken}), file)
    assert "Not a valid Parquet file after row 0" in upload(client, "a.parquet", file.getvalue())["detail"]


def test_a_job_whose_source_is_gone_is_not_retried(database: Database, settings: Settings) -> None:
    source, _ = succeeded(database, settings)
    dependent = started_from(database, source)
    with database.writing() as session:
        lifecycle.cancel(session, dependent)
    with database.writing() as session:
        lifecycle.remove(session, source)
    with pytest.raises(Unprocessable, match="has been deleted"), database.writing() as session:
        lifecycle.retry(session, dependent)
    with database.writing() as session:
        job = session.get_one(Job, dependent)
        job.status, job.error = "failed", {"code": "timeout"}
    with pytest.raises(Unprocessable, match="has been deleted"), database.writing() as session:
        lifecycle.resume(session, dependent)


def test_a_timed_out_job_is_not_resumed_while_another_needs_its_checkpoint(
    database: Database, settings: Settings
) -> None:
    """Going on, it would replace its checkpoints."""
    source, _ = succeeded(database, settings)
    with database.writing() as session:
        job = session.get_one(Job, source)
        job.status, job.error = "failed", {"code": "timeout"}
    started_from(database, source)
    with pytest.raises(Conflict, match="is still needed by unfinished jobs"), database.writing() as session:
        lifecycle.resume(session, source)


def test_another_key_s_job_is_not_named(database: Database, settings: Settings) -> None:
    source, _ = succeeded(database, settings)
    dependent = started_from(database, source)
    with database.writing() as session:
        session.get_one(Job, source).owner = "key-1"
        session.get_one(Job, dependent).owner = "key-2"
    owner = Viewer("key-1", "key-1")
    with pytest.raises(Conflict, match="another key") as caught, database.seen_by(owner).writing() as session:
        lifecycle.remove(session, source)
    assert dependent not in caught.value.message


@pytest.mark.parametrize(
    ("passes", "operations", "seconds"),
    [(1e-9, 1e15, 1e-9), (1e15, 1e-9, 1e15), (1e15, 1e15, 1e-9), (1.0, 1e15, 1e-9), (1e15, 1.0, 1e9)],
)
def test_extreme_work_gives_rates_that_are_numbers(passes: float, operations: float, seconds: float) -> None:
    work = Work(operations=operations, passes=passes, updates=1.0)
    rates = fitted(Device("cpu", "CPU", 2**34, "cpu"), "fp32", [MeasuredWork(work, seconds, 0.0)] * 3, work)
    assert rates is not None
    assert math.isfinite(rates.seconds_per_pass)
    assert math.isfinite(rates.seconds_per_operation)


@pytest.mark.sqlite
def test_rows_after_a_long_one_take_no_longer_than_others(client: TestClient) -> None:
    rows = json.dumps([{"text": "x" * 2**20}] + [{"text": "a"}] * 100_000).encode()
    started = time.monotonic()
    assert upload(client, "a.json", rows)["examples"] == 100_001
    assert time.monotonic() - started < 60  # twenty times as much as it takes


@pytest.mark.sqlite
def test_an_object_that_is_a_sample_is_one(client: TestClient) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sample = json.dumps({"messages": chat, "examples": [], "rows": [1]}).encode()
    assert upload(client, "a.json", sample)["examples"] == 1
    assert upload(client, "a.json", b'{"data": [{"text": "a"}], "train": []}')["examples"] == 1
