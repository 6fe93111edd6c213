"""Regression tests for the tenth attack: connections that wait, forms, comparisons, simulations, streams."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from select import select as select_descriptors
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from app.errors import Conflict
from app.jobs.events import record_event_without_webhook
from app.memory_profiles import profiles
from app.planning.architectures import UnknownArchitecture, from_config
from app.planning.catalogue import TINY_GPT2
from app.results import comparison
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Viewer
from app.storage.tables import Key, ProfileRequest, StepMetric
from app.web import http_connections
from app.web.body_limits import MAX_UPLOADS_PER_KEY
from app.web.downloads import Downloads
from app.web.event_stream import EventStream, in_turns
from tests.harness.connections import REQUEST, Connections
from tests.harness.log_lines import line
from tests.harness.requests import JOB, PATH, key_for, service
from tests.harness.runs import create_run, small_data, until
from tests.harness.specs import make_schedule, make_spec
from tests.harness.submissions import submitted
from tests.harness.training import run_to_end
from workers.profiling import __main__ as profiler
from workers.training.exceptions import CannotTrain

FILES = "/v1/files"


@pytest.fixture
def open_server() -> Connections:
    return Connections()


def test_a_client_that_does_not_read_its_response_is_disconnected(open_server: Connections) -> None:
    connection, transport = open_server.open()
    connection.data_received(REQUEST)
    transport.write(bytes(2**20))
    connection.pause_writing()
    open_server.clock.fire()
    assert transport.aborted


def test_a_client_that_reads_slowly_but_steadily_is_not(open_server: Connections) -> None:
    connection, transport = open_server.open()
    connection.data_received(REQUEST)
    transport.write(bytes(2**20))
    connection.pause_writing()
    while transport.unread > http_connections.READ_BYTES:
        transport.unread -= http_connections.READ_BYTES
        open_server.clock.fire()
        assert not transport.closed
    connection.resume_writing()
    open_server.clock.fire()
    assert not transport.closed


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (REQUEST, b"\r\n"),
        (b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", b"5"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n", b"x"),
        (b"HEAD / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\n", b"a"),
    ],
)
def test_bytes_after_a_response_do_not_keep_a_connection(
    open_server: Connections, request_: bytes, more: bytes
) -> None:
    connection, transport = open_server.open()
    connection.data_received(request_)
    open_server.answer(connection)
    connection.data_received(more)
    open_server.clock.fire()
    assert transport.closed
    open_server.clock.fire()
    assert transport.aborted, "it ends although its client does not read the rest"


def test_a_request_at_work_has_no_deadline(open_server: Connections) -> None:
    connection, transport = open_server.open()
    connection.data_received(REQUEST)
    open_server.clock.fire()
    assert not transport.closed


def test_a_new_connection_replaces_the_one_that_has_waited_longest() -> None:
    server = Connections(most=4 + http_connections.ENDING)
    working, its_transport = server.open()
    working.data_received(REQUEST)
    opened = [server.open() for _ in range(2)]
    opened[0][0].data_received(b"GET / HTTP/1.1\r\n")  # heard of last
    _, newest = server.open()
    assert [transport.aborted for _, transport in opened] == [False, True]
    assert not its_transport.aborted
    assert not newest.aborted


def test_a_pipelined_request_learns_of_the_disconnection(open_server: Connections) -> None:
    connection, _ = open_server.open()
    connection.data_received(REQUEST)
    first = connection.cycle
    connection.data_received(REQUEST * 2)
    connection.connection_lost(None)
    assert first.disconnected
    assert first.message_event.is_set()


@pytest.mark.parametrize(
    "parts",
    [
        [("file", ("a.jsonl", b'{"text": "a"}')), ("other", ("b.jsonl", b'{"text": "b"}'))],
        [("file", ("a.jsonl", b'{"text": "a"}')), *((f"field-{n}", (None, b"x")) for n in range(25))],
        [("file", ("a.jsonl", b'{"text": "a"}')), ("purpose", (None, b"x" * 2**15))],
    ],
    ids=["two files", "many fields", "a large field"],
)
def test_a_form_has_one_file_and_few_small_fields(client: TestClient, parts: list[Any]) -> None:
    assert client.post(FILES, files=parts).status_code == 400


def test_slow_bodies_of_one_key_are_limited(settings: Settings) -> None:
    with service(settings) as (client, slow):
        app: Any = client.app
        other = key_for(app.state.database)

        async def flood() -> int:
            tasks = [await send_slowly(app, slow) for _ in range(MAX_UPLOADS_PER_KEY)]
            large = {**JOB, "metadata": {}, "training_config": {"freeze": ["x" * 90] * 1000}}
            refused = await asyncio.to_thread(
                client.post, f"{PATH}/with-accumulation", headers=slow, json=large
            )
            others = await asyncio.to_thread(
                client.post, f"{PATH}/with-accumulation", headers=other, json=large
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert others.status_code != 429
            return refused.status_code

        assert asyncio.run(flood()) == 429


async def send_slowly(app: Any, header: dict[str, str]) -> asyncio.Task[None]:
    """Starts a request with a body of 70,000 bytes of which only the first arrives."""
    waiting = asyncio.Event()
    parts = [{"type": "http.request", "body": b"{", "more_body": True}]
    path = f"{PATH}/with-accumulation"
    named = {"host": "127.0.0.1", "content-type": "application/json", "content-length": "70000", **header}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "app": app,
    }  # fmt: skip

    async def receive() -> Any:
        if parts:
            return parts.pop()
        waiting.set()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    task = asyncio.create_task(app(scope, receive, send))
    await asyncio.wait_for(waiting.wait(), 30)
    return task


def with_steps(database: Database, count: int) -> str:
    job_id = submitted(database)
    with database.writing() as session:
        for step in range(1, count + 1):
            session.add(StepMetric(**{**vars(line(step)), "job_id": job_id}))
    return job_id


def test_one_job_is_not_compared_with_itself(database: Database) -> None:
    job_id = with_steps(database, 3)
    with database.reading() as session, pytest.raises(Conflict, match="the same job"):
        comparison.compare(session, [job_id, job_id], 10)


def test_of_a_long_job_only_some_steps_are_read(database: Database) -> None:
    long, short = with_steps(database, 3000), with_steps(database, 3000)
    with database.reading() as session:
        run = comparison._run(session, session.get_one(comparison.Job, long), 40)
        assert len(run.samples) <= 42
        assert run.samples[-1] == 3000 * run.samples[0]
        compared = comparison.compare(session, [long, short], 10)
    assert [job.steps for job in compared.jobs] == [3000, 3000]
    assert compared.loss[long] == compared.loss[short]


def test_comparisons_of_one_key_are_limited(settings: Settings) -> None:
    with service(settings) as (client, header):
        app: Any = client.app
        other = key_for(app.state.database)
        limit = app.state.comparisons
        with app.state.database.reading() as session:
            key_id = session.scalar(select(Key.id).order_by(Key.created_at))
        held = [limit.acquire(key_id) for _ in range(2)]
        path = "/gradient-accumulation/stats/compare?ids=ftjob-1&ids=ftjob-2"
        assert client.get(path, headers=header).status_code == 429
        assert client.get(path, headers=other).status_code == 404
        for end in held:
            end()
        assert client.get(path, headers=header).status_code == 404


@pytest.mark.parametrize("other", [{"num_hidden_layers": 10**6}, {"num_layers": 3}, {"hidden_size": 64}])
def test_a_config_that_names_one_size_twice_is_rejected(other: dict[str, int]) -> None:
    with pytest.raises(UnknownArchitecture, match="gives two values for the same size"):
        from_config({**TINY_GPT2, **other})
    from_config({**TINY_GPT2, "num_hidden_layers": TINY_GPT2["n_layer"]})


def test_a_simulation_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> Iterator[Any]:
        yield bytearray(2 * profiler._SIMULATION_BYTES)

    def endless() -> Iterator[Any]:
        while True:
            time.sleep(0.01)
        yield None

    with pytest.raises(MemoryError):
        profiler._next_within_limits(greedy(), time.monotonic() + 60)
    with pytest.raises(TimeoutError, match="took longer"):
        profiler._next_within_limits(endless(), time.monotonic())
    assert profiler._next_within_limits(iter(()), time.monotonic() + 60) is None


def request_profile(database: Database, sequence: int, key_id: str | None) -> None:
    with database.seen_by(Viewer(None, creator=key_id)).writing() as session:
        profiles.request(session, wanted(sequence))


def wanted(sequence: int) -> profiles.ProfileKey:
    recipe = profiles.Recipe(device="cpu", precision="fp32")
    return profiles.ProfileKey("a/model", from_config(TINY_GPT2), TINY_GPT2, recipe, sequence)


def test_keys_take_turns_for_simulations(database: Database) -> None:
    for sequence in (16, 32, 48):
        request_profile(database, sequence, "key-a")
    request_profile(database, 8, "key-b")
    request_profile(database, 64, "key-a")
    served: dict[str | None, float] = {}
    claimed = []
    for _ in range(3):
        with database.writing() as session:
            request = profiles.claim(session, served)
            assert request is not None
            claimed.append((request.requested_by, request.sequence))
    assert sorted(claimed[:2]) == [("key-a", 64), ("key-b", 8)]
    assert claimed[2] == ("key-a", 48)


def test_a_simulation_that_ended_the_profiler_is_not_tried_again(database: Database) -> None:
    request_profile(database, 16, None)
    with database.writing() as session:
        assert profiles.claim(session, {}) is not None
        session.execute(profiles.update(ProfileRequest).values(claimed_at=0.0))
    with database.writing() as session:
        assert profiles.claim(session, {}) is None
    assert "ended the profiler" in (profiles.request_warnings(database, wanted(16)) or [""])[0]


def test_keys_take_turns_for_events(database: Database) -> None:
    flooded, quiet = submitted(database), submitted(database)
    with database.writing() as session:
        for number in range(300):
            record_event_without_webhook(session, flooded, 0, "checkpoint", f"{number}")
    stream = EventStream(database)
    greedy = [stream.join(flooded, key_id="key-a") for _ in range(100)]
    patient = stream.join(quiet, key_id="key-b")
    found, _ = stream._new_events([*greedy, patient])
    assert len(found[100]) == 1
    assert max(len(events) for events in found.values()) <= 50
    assert sum(len(events) for events in found.values()) <= 2100


def test_a_poll_serves_keys_in_turns_up_to_its_limit() -> None:
    counts = {0: 50, 1: 50, 2: 50, 3: 1}
    assert in_turns(counts, {0: "a", 1: "a", 2: "a", 3: "b"}, 60) == [0, 3, 1]
    assert in_turns(counts, {0: "a", 1: "a", 2: "a", 3: "b"}, 1000) == [0, 3, 1, 2]
    assert in_turns({}, {}, 10) == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_that_changes_no_weight_saves_no_model(tmp_path: Path, method: str) -> None:
    from app.planning.defaults import method_spec

    schedule = make_schedule("constant", warmup_steps=5)
    spec = make_spec(data=small_data(), max_steps=1, schedule=schedule, method=method_spec(method))
    run = create_run(tmp_path / "run", spec)
    with pytest.raises(CannotTrain, match="no step changed any weight") as caught:
        run_to_end(run)
    assert caught.value.code == "nothing_to_learn"
    assert not run.model.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 1e-300), ("optimizer_args", {"eps": 1e300}), ("optimizer_args", {"eps": 2})],
)
def test_arguments_without_any_effect_are_rejected(client: TestClient, field: str, value: Any) -> None:
    job = {**JOB, "training_config": {field: value}}
    assert client.post(f"{PATH}/with-accumulation", json=job).status_code == 422


def test_a_file_that_is_deleted_while_it_is_sent_is_sent_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    downloads, sent = Downloads(), []
    response = downloads.file("key", path.open("rb"), media_type="text/plain")
    path.unlink()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": []}
    asyncio.run(response(scope, receive, send))
    assert sent[0]["status"] == 200
    assert b"".join(message.get("body", b"") for message in sent[1:]) == b"content" * 1000
    assert not downloads._limit._open


def test_a_file_whose_content_is_gone_is_not_found(client: TestClient, settings: Settings) -> None:
    answer = client.post(FILES, files={"file": ("a.jsonl", b'{"text": "abc"}')}).json()
    (settings.files_dir / answer["id"]).unlink()
    assert client.get(f"{FILES}/{answer['id']}/content").status_code == 404


def test_a_recommendation_for_several_devices_can_be_submitted(client: TestClient) -> None:
    path = (
        "/gradient-accumulation/performance/recommendations?model_name=accrue/tiny-gpt2&gpus=24GB&gpus=24GB"
    )
    recommended = client.get(path).json()
    assert recommended["submission"]["num_gpus"] == 2
    config = recommended["submission"]["training_config"]
    job = {**JOB, **recommended["submission"], "training_config": config, "dry_run": True}
    job["target_effective_batch_size"] = recommended["submission"]["target_effective_batch_size"]
    answer = client.post(f"{PATH}/with-accumulation", json=job)
    assert answer.status_code == 200, answer.text
    assert config["warmup_ratio"] == 0.1  # of however many steps the job will have
    assert [each for each in answer.json()["plan"]["warnings"] if "warmup" in each] == []


@pytest.mark.parametrize("weight", [1e-7, 5e-324])
def test_negligible_weights_of_inline_samples_are_rejected(client: TestClient, weight: float) -> None:
    samples = [{"prompt": "a", "completion": "b", "weight": weight}]
    job = json.dumps({**JOB, "dataset_config": {"prompts": samples}})
    header = {"Content-Type": "application/json"}
    answer = client.post(f"{PATH}/with-accumulation", content=job, headers=header)
    assert answer.status_code == 422
    assert "at least 1e-06" in answer.text


def test_the_forks_of_a_killed_profiler_end(tmp_path: Path) -> None:
    script = f"""
import os, time
from pathlib import Path
from select import select as select_descriptors
from workers.profiling.parallel_forks import run_in_forks

def busy():
    Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
    while True:
        pass

run_in_forks([lambda: time.sleep(600), busy])
"""
    profiler_process = subprocess.Popen([sys.executable, "-c", script])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    fork = os.pidfd_open(int((tmp_path / "pid").read_text()))
    profiler_process.kill()
    profiler_process.wait()
    readable, _, _ = select_descriptors([fork], [], [], 60)
    os.close(fork)
    assert readable, "the fork has ended"
