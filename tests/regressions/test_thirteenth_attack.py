"""Regression tests for the thirteenth attack."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from anyio import to_thread
from fastapi.testclient import TestClient
from pydantic import ValidationError
from sqlalchemy import select

from app.contract import base
from app.contract.plan import FixedCount, TokenBudget
from app.contract.reports import Outcome, RankShares
from app.errors import Conflict, TooManyRequests
from app.jobs import lifecycle, reservations
from app.jobs.request_schemas import TrainingRequest
from app.main import create_app
from app.memory_profiles import profiles
from app.planning import planner
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import Device
from app.planning.plan import question_of
from app.planning.planner import Capacity
from app.results import comparison
from app.results.run_files import remove_models
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Viewer
from app.storage.tables import AuditEntry, Delivery, ProfileRequest
from app.web import concurrency
from app.web.concurrency import SlowWork
from app.web.http_connections import MAX_HEAD_BYTES, MAX_PIPELINED
from tests.harness.connections import REQUEST, Connections
from tests.harness.log_lines import line
from tests.harness.requests import JOB, PATH, key_for, service
from tests.harness.runs import create_run, events_of
from tests.harness.specs import cpu_plan, make_spec
from tests.harness.submissions import submitted
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.checkpoints.state import LearnedBudget
from workers.training.checks import certificate
from workers.training.distributed import group, independent
from workers.training.exceptions import LostRank
from workers.training.micro_batches.batches import Groups
from workers.training.micro_batches.budget import Budget

POST = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_client_that_sends_many_requests_at_once_is_cut_off() -> None:
    connection, transport = Connections().open()
    connection.data_received(REQUEST * (MAX_PIPELINED + 1))
    assert len(connection.pipeline) == MAX_PIPELINED
    assert not transport.aborted
    connection.data_received(REQUEST * 5000)
    assert transport.aborted
    assert len(connection.pipeline) == MAX_PIPELINED


def test_no_further_request_is_read_while_some_wait() -> None:
    connection, transport = Connections().open()
    connection.data_received(REQUEST * 3)
    cycles = [connection.cycle, *(cycle for cycle, _ in connection.pipeline)]
    assert not transport.is_reading
    connection.on_response_complete()
    assert not transport.is_reading, "one request still waits"
    connection.on_response_complete()
    assert transport.is_reading
    assert len(cycles) == 3


def test_what_follows_a_body_is_neither_kept_nor_endless() -> None:
    connection, transport = Connections().open()
    connection.data_received(POST + b"1\r\na\r\n0\r\n")
    headers = list(connection.headers)
    for _ in range(100):
        connection.data_received(b"a: b\r\n" * 1000)
        if transport.aborted:
            break
    assert transport.aborted
    assert connection.headers == headers


def test_an_endless_trailer_is_cut_off() -> None:
    connection, transport = Connections().open()
    connection.data_received(POST + b"0\r\n")
    received = 0
    while not transport.aborted and received < 10 * MAX_HEAD_BYTES:
        connection.data_received(b"a" * 4096)
        received += 4096
    assert transport.aborted


def test_a_long_body_in_small_parts_is_received() -> None:
    connection, transport = Connections().open()
    connection.data_received(POST)
    for _ in range(2000):
        for part in (b"1\r\n", b"a", b"\r\n"):
            connection.data_received(part)
    connection.data_received(b"0\r\n\r\n")
    assert not transport.aborted
    assert len(connection.cycle.body) == 2000


def test_deleting_a_model_follows_no_link(settings: Settings, tmp_path: Path) -> None:
    runs = settings.runs_dir
    own, other = runs / "ftjob-own", runs / "ftjob-other"
    for folder in (own / "model", own / "replica-0" / "model", other / "model"):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("weights")
    (own / "replica-1").symlink_to("../ftjob-other")
    (own / "replica-2").symlink_to(os.path.relpath(other, own))
    remove_models(settings, "ftjob-own")
    assert (other / "model" / "weights").exists()
    assert not (own / "model").exists()
    assert not (own / "replica-0" / "model").exists()


@pytest.mark.parametrize(
    "training",
    [
        {"freeze": ["a" * 201]},
        {"method": {"lora": {"target_modules": ["a" * 201]}}},
    ],
)
def test_patterns_have_a_maximum_length(client: TestClient, training: dict[str, Any]) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "training_config": training})
    assert answer.status_code == 422
    assert "200" in answer.text


def test_every_text_of_a_request_has_a_maximum_length(settings: Settings) -> None:
    """Other than samples, a file's content, and what the query holds, which the head's size limits."""
    schemas = create_app(settings).openapi()
    unlimited = list(unlimited_texts(schemas))
    samples = (
        ".texts[]", ".prompt", ".completion", ".content", ".content[].text", ".reasoning_content", ".file",
    )  # fmt: skip
    assert [path for path in unlimited if not path.endswith(samples)] == []


def unlimited_texts(document: dict[str, Any]) -> Iterator[str]:
    """The paths to all strings without a maximum length in the bodies of requests."""
    named = document["components"]["schemas"]

    def within(node: dict[str, Any], path: str, above: tuple[str, ...]) -> Iterator[str]:
        name = node.get("$ref", "").rpartition("/")[2]
        if name:
            if name not in above:
                yield from within(named[name], path, (*above, name))
            return
        for kind in ("anyOf", "oneOf", "allOf"):
            for each in node.get(kind, []):
                yield from within(each, path, above)
        if node.get("type") == "string" and not {"maxLength", "enum", "const"} & node.keys():
            yield path
        if "items" in node:
            yield from within(node["items"], f"{path}[]", above)
        for field, each in node.get("properties", {}).items():
            yield from within(each, f"{path}.{field}", above)
        if isinstance(node.get("additionalProperties"), dict):
            yield from within(node["additionalProperties"], f"{path}{{}}", above)

    for path, operations in document["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield from within(content["schema"], path, ())


def test_a_key_keeps_only_so_many_requests_for_profiles(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_MOST_REQUESTS", 5)
    for key_id, count in (("key-a", 20), ("key-b", 3)):
        for number in range(count):
            with database.seen_by(Viewer(None, creator=key_id)).writing() as session:
                profiles.request(session, wanted(len(key_id) + 8 * number + (key_id == "key-b")))
    with database.reading() as session:
        kept = Counter(session.scalars(select(ProfileRequest.requested_by)))
    assert kept == {"key-a": 5, "key-b": 3}


def wanted(sequence: int) -> profiles.ProfileKey:
    recipe = profiles.Recipe(device="cpu", precision="fp32")
    return profiles.ProfileKey("a/model", from_config(TINY_GPT2), TINY_GPT2, recipe, sequence)


def test_slow_work_of_a_key_leaves_threads_to_others() -> None:
    async def crowd() -> None:
        slow, ended = SlowWork(), threading.Event()
        running, most = 0, 0
        counting = threading.Lock()

        def work() -> None:
            nonlocal running, most
            with counting:
                running += 1
                most = max(most, running)
            ended.wait(60)
            with counting:
                running -= 1

        greedy = [asyncio.create_task(slow.run("key-a", work)) for _ in range(50)]
        await asyncio.sleep(0.2)
        assert most == concurrency._THREADS_PER_KEY
        assert await asyncio.wait_for(slow.run("key-b", lambda: 5), 30) == 5
        assert await asyncio.wait_for(to_thread.run_sync(lambda: 6), 30) == 6
        more = [asyncio.create_task(slow.run("key-a", work)) for _ in range(51)]
        with pytest.raises(TooManyRequests):
            await more[-1]
        ended.set()
        await asyncio.gather(*greedy, *more[:-1])
        assert slow._turns._of_keys == {}

    asyncio.run(crowd())


def test_a_large_body_counts_as_several_requests(settings: Settings) -> None:
    with service(settings, rate_limit="100/minute") as (client, key):
        large = {"dataset_config": {"texts": ["a"] * 20_000}, "dry_run": True}
        statuses = [
            client.post(f"{PATH}/with-accumulation", json={**JOB, **large}, headers=key).status_code
            for _ in range(12)
        ]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert statuses.count(200) == 9


def test_calculators_are_not_audited(settings: Settings) -> None:
    with service(settings) as (client, key):
        steps = {"target_batch_size": 32, "actual_batch_size": 8}
        path = "/gradient-accumulation/calculate-accumulation-steps"
        assert client.post(path, params=steps, headers=key).status_code == 200
        assert client.post("/gradient-accumulation/config", json={}, headers=key).status_code < 500
    database = Database(settings.resolved_database_url)
    with database.reading() as session:
        paths = set(session.scalars(select(AuditEntry.path)))
    database.close()
    assert path not in paths
    assert "/gradient-accumulation/config" in paths


def test_pauses_of_a_waiting_job_are_limited(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MOST_PAUSES", 3)
    job_id = submitted(database, webhook_url="https://example.com/hook")

    def toggle() -> None:
        with database.writing() as session:
            lifecycle.pause(session, job_id)
        with database.writing() as session:
            lifecycle.resume(session, job_id)

    for _ in range(3):
        toggle()
    with pytest.raises(Conflict, match="paused 3 times"):
        toggle()
    with database.reading() as session:
        assert len(session.scalars(select(Delivery)).all()) == 1, "the first is not delivered yet"


def test_a_request_is_checked_once_with_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(base, "size_error", lambda given: checked.append(given))
    prompts = [{"prompt": "", "completion": "a"} for _ in range(100)]
    TrainingRequest.model_validate({**JOB, "dataset_config": {"prompts": prompts}})
    assert len(checked) == 1
    TrainingRequest.model_validate({**JOB, "dataset_config": {"texts": [r"\u0000 is fine"]}})
    for text in ("a\x00b", "\ud800"):
        with pytest.raises(ValidationError, match="NUL"):
            TrainingRequest.model_validate({**JOB, "dataset_config": {"texts": ["a", text]}})


class Unequal:
    """A job's run on two ranks with unequal budgets, as one of the ranks sees it."""

    def __init__(self, rank: int) -> None:
        spec, lengths = make_spec(effective_batch_size=32), np.full(32, 64)
        plan = cpu_plan(spec).ranks[0]
        tokens = (1024, 256)
        self.budgets = [Budget(plan, LearnedBudget(tokens=own, failed_tokens=2 * own), 32) for own in tokens]
        self.budget = self.budgets[rank]
        self.batch = 32
        self.loader = SimpleNamespace(lengths=lambda window: lengths[window])


def test_all_ranks_know_the_same_reference_split() -> None:
    window = np.arange(32)
    plan: list[Groups] = [[list(range(16))], [list(range(16, 32))]]
    first, second = (certificate._all_on_one(Unequal(rank), window, plan) for rank in (0, 1))  # type: ignore[arg-type]
    assert first == second
    assert sorted(place for group in first for place in group) == list(range(32))


def test_only_errors_of_the_connection_are_a_lost_rank() -> None:
    for error in (
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("No backend type associated with device type cpu"),
    ):
        with pytest.raises(type(error)), group._connected():
            raise error
    gloo = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    with pytest.raises(LostRank, match="closed by peer"), group._connected():
        raise gloo
    with pytest.raises(LostRank), group._connected():
        raise torch.distributed.DistBackendError("NCCL error")


def test_a_plan_that_is_tuned_has_a_token_budget() -> None:
    """Even where the whole window fits in one micro-batch, but not with another one's gradient."""
    for tune in (None, "first"):
        spec = make_spec(effective_batch_size=8, tune=tune)
        question = question_of(spec, [Device("cpu", "CPU", 2**35, "cpu")], spec.data.max_length)
        capacity = Capacity(question.devices[0], 2**35, 7, 8, 7, 8, 7 * 64)
        rules, _ = planner._planned(question, [capacity])
        assert isinstance(rules[0], FixedCount if tune is None else TokenBudget)


def test_the_trainer_shows_that_it_works(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / "progress.json").write_text("1234")
    inner = run.path / "replica-0" / "checkpoints" / ".step-1"
    inner.mkdir(parents=True)
    signs = [run.signs_of_work()]
    os.utime(run.path / "progress.json", ns=(1, time.time_ns() + 10**9))  # rewritten with as many bytes
    signs.append(run.signs_of_work())
    (inner / "weights").write_text("weights")
    signs.append(run.signs_of_work())
    run.note_work()
    os.utime(run.path / "at-work", ns=(1, time.time_ns() + 2 * 10**9))
    signs.append(run.signs_of_work())
    assert len(set(signs)) == 4
    assert run.signs_of_work() == signs[-1]


def test_shares_of_windows_that_were_never_reported_are_forgotten(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec())
    for step in (20, 50, 60, 90):
        run.append_shares(RankShares(step=step, shares=(0.5, 0.5)))
    run.forget_decisions(after=55)
    assert [line.step for line in run.shares()] == [20, 50]


def test_devices_are_kept_for_at_most_half_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the job before is always about to end, as it says."""
    now = 0.0
    monkeypatch.setattr(reservations.time, "monotonic", lambda: now)
    keeping, kept = reservations.Reservations(), 0.0
    while now < 10_000:
        job = reservations.ReservableJob(1.0, 2, frozenset(), waited_seconds=60.0 + now, job_id="ftjob-wide")
        found = reservations.tiers(keeping.update([job]), [1], {0: 0.5})
        keeping.note(found)
        kept += 5.0 if not found[-1].devices else 0.0
        now += 5.0
    assert 0.4 * now < kept <= 0.5 * (now + 60.0) + 5.0


def test_the_order_of_named_gpus_does_not_matter() -> None:
    fields = {**JOB, "accumulation_steps": [1, 7], "target_effective_batch_size": None}
    one = TrainingRequest.model_validate({**fields, "gpu_ids": [1, 0]})
    assert (one.gpu_ids, one.accumulation_steps_by_device) == ([0, 1], [7, 1])


def test_the_number_of_replicas_is_limited(client: TestClient) -> None:
    texts = {"texts": [f"text {number}" for number in range(100)]}
    job = {**JOB, "dataset_config": texts, "parallel_independent": True, "dry_run": True}
    assert client.post(f"{PATH}/with-accumulation", json={**job, "num_gpus": 64}).status_code == 200
    answer = client.post(f"{PATH}/with-accumulation", json={**job, "num_gpus": 65})
    assert answer.status_code == 422
    assert "64" in answer.text


def test_a_million_micro_batches_are_planned_at_once(client: TestClient) -> None:
    job = {**JOB, "accumulation_steps": None, "target_effective_batch_size": 1_000_000,
           "micro_batch_size": 1, "num_gpus": 1000, "dry_run": True}  # fmt: skip
    began = time.process_time()
    answer = client.post(f"{PATH}/with-accumulation", json=job)
    assert answer.status_code in (200, 422)
    assert time.process_time() - began < 5


def test_a_comparison_of_steps_without_samples() -> None:
    assert comparison._interpolate([0.0, 1.0], [0.0, 0.0, 1.0], [3.0, 3.0, 5.0]) == [3.0, 5.0]


def test_replicas_that_take_turns_report_their_progress(tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path / f"replica-{number}") for number in range(3)]
    for run in runs:
        run.path.mkdir()
    job = RunDirectory(tmp_path)
    with Reporter(runs[0], 1) as first, Reporter(job, 1) as reporter:
        for step in (1, 2, 3):
            first.step(line(step))
        first.event("checkpoint", "Checkpoint at step 3.", step=3, name="step-3")
        independent._Merged(runs, reporter, 1, 0).update()
    (event,) = events_of(job)
    assert (event["type"], event["data"]["step"], event["data"]["progress"]) == ("checkpoint", 3, 3)


def test_a_replica_that_is_far_ahead_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independent, "_MOST_STEPS_AHEAD", 10)
    runs = [RunDirectory(tmp_path / f"replica-{number}") for number in range(2)]
    for run in runs:
        run.path.mkdir()
    job = RunDirectory(tmp_path)
    with Reporter(job, 1) as reporter:
        merged = independent._Merged(runs, reporter, 1, 0)
        for number, run in enumerate(runs):
            with Reporter(run, 1) as own:
                for step in range(1, 101):
                    own.step(line(step))
                    if step % 20 == 0:
                        own.event("checkpoint", f"Checkpoint at step {step}.", step=step, name="a")
                    merged.update()
                    assert max(map(len, merged._lines)) <= 10
                    assert max(len(totals._up_to) for totals in merged._totals) <= 12
            assert number or not job.metrics.read_bytes()
    steps = [json.loads(raw) for raw in job.metrics.read_text().splitlines()]
    assert [each["step"] for each in steps] == list(range(1, 101))
    assert steps[-1]["ranks"][1]["total_tokens"] == 100 * line(1).input_tokens


def test_steps_are_reported_once_another_replica_has_ended(tmp_path: Path) -> None:
    """Although no replica writes anything after that."""
    runs = _replicas_with_steps(tmp_path, 3, 1)
    job = RunDirectory(tmp_path)
    with Reporter(job, 1) as reporter:
        merged = independent._Merged(runs, reporter, 2, 0)
        merged.update()
        assert len(job.metrics.read_bytes().splitlines()) == 1
        runs[1].write_outcome(_OUTCOME)
        merged.update()
    assert len(job.metrics.read_bytes().splitlines()) == 3


def test_the_last_steps_of_a_replica_that_has_just_ended_count(tmp_path: Path) -> None:
    """Although the other replica's steps were read before them."""
    runs = _replicas_with_steps(tmp_path, 3, 0)
    job = RunDirectory(tmp_path)
    with Reporter(job, 1) as reporter:
        merged = independent._Merged(runs, reporter, 2, 0)
        merged.update()
        assert not job.metrics.read_bytes()
        _replicas_with_steps(tmp_path, 0, 2)
        runs[1].write_outcome(_OUTCOME)
        merged.update()
    steps = [json.loads(raw) for raw in job.metrics.read_text().splitlines()]
    assert [len(each["ranks"]) for each in steps] == [2, 2, 1]


_OUTCOME = Outcome(
    files=(), steps=1, first_loss=1.0, final_loss=1.0, trained_tokens=1, effective_batch_size=1,
    eval_loss=None, best_step=None, equivalence_error=None,
)  # fmt: skip


def _replicas_with_steps(folder: Path, *counts: int) -> list[RunDirectory]:
    """The run directories of replicas; each log gets the given number of steps."""
    runs = [RunDirectory(folder / f"replica-{number}") for number in range(len(counts))]
    for run, steps in zip(runs, counts, strict=True):
        run.path.mkdir(exist_ok=True)
        with Reporter(run, 1) as own:
            for step in range(1, steps + 1):
                own.step(line(step))
    return runs


def test_the_files_of_a_key_have_a_limit(settings: Settings) -> None:
    with service(settings, max_stored_bytes=100) as (client, key):
        other = key_for(client.app.state.database)  # type: ignore[attr-defined]
        line = b'{"text": "forty characters in a training file"}'
        upload = {"file": ("a.jsonl", line)}
        statuses = [
            client.post("/v1/files", files=upload, headers=header).status_code
            for header in (key, key, key, other)
        ]
        submitted = client.post(f"{PATH}/with-accumulation", json=JOB, headers=key)
    assert statuses == [200, 200, 429, 200]
    assert submitted.status_code == 429
    assert "ACCRUE_MAX_STORED_BYTES" in submitted.text
