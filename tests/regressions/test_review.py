"""Answers that a review found wrong or missing."""

import csv
import json
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.contract.reports import Failure
from app.devices import live_workers
from app.jobs import queue
from app.jobs.events import record_event
from app.jobs.transitions import Fence
from app.main import create_app
from app.planning.devices import GIB
from app.planning.inputs import ShortCache
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job, Worker
from tests.harness.requests import JOB, PATH, submit

CALCULATE = "/gradient-accumulation/calculate-batch-size"


@pytest.mark.parametrize("gpus", [["A100-80GB", "24GB"], ["24GB", "A100-80GB"], ["16GB", "24GB", "80GB"]])
def test_the_explanation_compares_each_device_with_its_own_limit(client: TestClient, gpus: list[str]) -> None:
    requested = {"model_name": "gpt2", "gpus": gpus, "target_effective_batch_size": 512, "wait_seconds": 0}
    answer = client.post(CALCULATE, json=requested).json()
    assert answer["fits"] is True
    taken, may = (
        float(part.split()[-1]) for part in answer["explanation"].split(" GiB")[0].split(" of the ")
    )
    assert taken <= may
    assert may in [round(each["memory_limit_bytes"] / GIB, 2) for each in answer["devices"]]


@pytest.mark.parametrize("method", ["lora", "qlora", {"lora": {"r": 8}}])
def test_adapters_have_a_learning_rate_of_their_own(client: TestClient, method: Any) -> None:
    job = submit(client, training_config={"method": method})
    assert job["training_config"]["learning_rate"] == 2e-4
    assert submit(client, training_config={"epochs": 1})["training_config"]["learning_rate"] == 5e-5
    given = submit(client, training_config={"method": method, "learning_rate": 1e-3})
    assert given["training_config"]["learning_rate"] == 1e-3


def test_unsynchronised_gradients_are_refused_with_the_reason(client: TestClient) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "sync_gradients": False})
    assert answer.status_code == 422
    assert "instead of the effective batch's" in answer.json()["detail"]


def test_log_accumulation_can_be_disabled(client: TestClient) -> None:
    assert submit(client, log_accumulation=False)["config"]["log_accumulation"] is False


def test_only_target_effective_batch_size_is_accepted_in_the_query(client: TestClient) -> None:
    query = {"model_name": "gpt2", "gpus": "24GB", "wait_seconds": 0, "target_effective_batch_size": 48}
    assert client.get(CALCULATE, params=query).json()["effective_batch_size"] == 48
    assert client.get(CALCULATE, params={**query, "target_batch_size": 48}).status_code == 422


@pytest.mark.parametrize(
    ("size", "parameters"), [("2b", 2 * 10**9), ("350M", 350 * 10**6), ("Small", 125 * 10**6)]
)
def test_memory_sizes_are_parsed_in_common_notations(client: TestClient, size: str, parameters: int) -> None:
    answer = client.get(f"/gradient-accumulation/performance/recommendations?model_size={size}")
    assert answer.json()["parameters"] == parameters


def test_the_requested_model_name_is_not_suggested_again(client: TestClient) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "model_name": "meta-llama/Llama-3.1-8B"})
    assert "Did you mean" not in answer.json()["detail"]


def test_jobs_by_model_and_time(client: TestClient) -> None:
    job = submit(client)
    mine = {"model": job["model_name"], "since": job["created_at"], "until": job["created_at"] + 3600}
    assert [each["id"] for each in client.get(PATH, params=mine).json()["data"]] == [job["id"]]
    for none in ({"model": "other"}, {"until": job["created_at"]}, {"since": job["created_at"] + 3600}):
        assert client.get(PATH, params=none).json()["data"] == []


def test_a_configuration_is_changed_in_part_or_replaced(client: TestClient) -> None:
    config = "/gradient-accumulation/config"
    made = client.post(config, json={"accumulation_steps": 4, "micro_batch_size": 2}).json()
    own = f"{config}/{made['config_id']}"
    changed = client.patch(own, json={"accumulation_steps": 8}).json()
    assert (changed["effective_batch_size"], changed["config"]["micro_batch_size"]) == (16, 2)
    replaced = client.put(own, json={"target_effective_batch_size": 32}).json()
    assert (replaced["effective_batch_size"], replaced["config"]["accumulation_steps"]) == (32, None)
    assert client.get(own).json()["config"] == replaced["config"]
    assert client.patch(own, json={"target_batch_size": 48}).json()["effective_batch_size"] == 48
    assert client.patch(own, json={"no_such": 1}).status_code == 422
    assert client.patch(own, json={"accumulation_steps": 0}).status_code == 422
    assert client.patch(f"{config}/accumulation_1", json={}).status_code == 404


CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"texts": ["a", "b"]}, "text"),
        ({"prompts": [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "", "completion": "x"}]},
         "prompt_completion"),
        ({"messages": [CHAT, CHAT]}, "messages"),
    ],
)  # fmt: skip
def test_inline_samples_of_every_format(client: TestClient, given: dict[str, Any], form: str) -> None:
    job = submit(client, dataset_config=given)
    assert (job["dataset"]["format"], job["dataset"]["examples"]) == (form, 2)
    content = client.get(f"/v1/files/{job['dataset']['file_id']}/content").text
    assert len(content.splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"messages": [CHAT, CHAT[:1]]}, "of the role assistant with weight 1"),
        ({"messages": [[]]}, "messages"), ({"prompts": []}, "prompts is empty"),
        ({"prompts": [{"prompt": "a"}]}, "completion"), ({"texts": ["a"], "messages": [CHAT]}, "exactly one"),
        ({"messages": [CHAT], "format": "text"}, "of format messages"),
        ({"prompts": [{"prompt": "a", "completion": "b", "label": 1}]}, "label"),
    ],
)  # fmt: skip
def test_invalid_inline_samples_are_rejected(client: TestClient, given: dict[str, Any], told: str) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "dataset_config": given})
    assert answer.status_code == 422
    assert told in answer.text


def test_every_step_is_an_event_and_a_row_with_its_validation_loss(client: TestClient) -> None:
    from app.jobs.events import record_event_without_webhook
    from tests.harness.log_lines import line
    from workers.ingest import _store_metrics

    job = submit(client)["id"]
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    now = time.time()
    with database.writing() as session:
        _store_metrics(
            session, job,
            [line(step, loss=1 / step).model_copy(update={"time": now + step}) for step in range(1, 31)],
        )  # fmt: skip
        record_event_without_webhook(
            session, job, 1, "evaluation", "evaluated", data={"step": 20, "loss": 0.25, "best": True}
        )  # of a version without token accuracy
        record_event_without_webhook(
            session, job, 1, "evaluation", "evaluated",
            data={"step": 30, "loss": 0.2, "token_accuracy": 0.75, "best": True},
        )  # fmt: skip
    events: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        query = {"limit": 7} | ({"after": page["last_id"]} if page["last_id"] else {})
        page = client.get(f"/v1/fine_tuning/jobs/{job}/events", params=query).json()
        events += page["data"]
    assert [each["id"] for each in events] == sorted({each["id"] for each in events}, reverse=True)
    metrics = [each for each in events if each["type"] == "metrics"]
    assert [each["data"]["step"] for each in metrics] == list(range(30, 0, -1))
    assert metrics[10]["data"] == {"step": 20, "train_loss": 0.05, "valid_loss": 0.25}
    assert metrics[0]["data"] == {
        "step": 30, "train_loss": 1 / 30, "valid_loss": 0.2, "valid_mean_token_accuracy": 0.75,
    }  # fmt: skip
    assert len(events) == 30 + 3
    rows = list(csv.DictReader(client.get(f"{PATH}/{job}/metrics?format=csv").text.splitlines()))
    evaluated = [(row["valid_loss"], row["valid_mean_token_accuracy"]) for row in rows if row["valid_loss"]]
    assert evaluated == [("0.25", ""), ("0.2", "0.75")]
    assert rows[19]["valid_loss"] == "0.25"
    assert len(client.get(f"{PATH}/{job}/log?from_step=28").text.splitlines()) == 3


@pytest.mark.parametrize("given", ["LAMB", "lamb", "adam", "AdamW", "adamw-8bit"])
def test_optimizer_names_are_accepted_in_any_spelling(client: TestClient, given: str) -> None:
    body = {**JOB, "dry_run": True, "training_config": {"optimizer": given}}
    answer = client.post(f"{PATH}/with-accumulation", json=body)
    assert answer.status_code == 200, answer.text
    query = f"model_name=accrue/tiny-gpt2&optimizer={given}"
    assert client.get(f"/gradient-accumulation/calculate-batch-size?{query}").status_code == 200


def test_adam_with_weight_decay_is_not_treated_as_adamw(client: TestClient) -> None:
    body = {**JOB, "training_config": {"optimizer": "Adam", "weight_decay": 0.1}}
    answer = client.post(f"{PATH}/with-accumulation", json=body)
    assert answer.status_code == 422
    assert "adamw" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("field", "said"), [("use_peft", '"lora"'), ("load_in_4bit", '"qlora"'), ("fp16", "mixed_precision")]
)
def test_errors_for_foreign_switches_suggest_our_equivalent(
    client: TestClient, field: str, said: str
) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "training_config": {field: True}})
    assert said in answer.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [
        "model_name=accrue/tiny-gpt2",
        "model_name=accrue/tiny-gpt2&target_effective_batch_size=1000000",
        "model_name=gpt2&optimizer=SGD&target_batch_size=16384&gpus=24GB",
        "model_name=accrue/tiny-gpt2&method=lora&dataset_size=100000&gpus=24GB&gpus=24GB",
        "model_name=accrue/tiny-gpt2&target_batch_size=16384&kind=vision&clip_mode=each_micro_batch",
    ],
)
def test_what_is_recommended_can_be_submitted(client: TestClient, query: str) -> None:
    answer = client.get(f"/gradient-accumulation/performance/recommendations?{query}")
    assert answer.status_code == 200, answer.text
    own = {"model_name": "accrue/tiny-gpt2", "dataset_config": JOB["dataset_config"], "dry_run": True}
    devices = {"num_gpus": max(1, query.count("gpus="))}
    made = client.post(f"{PATH}/with-accumulation", json={**own, **devices, **answer.json()["submission"]})
    assert made.status_code == 200, made.text


def test_jobs_are_planned_for_the_workers_devices(client: TestClient) -> None:
    database: Database = client.app.state.database  # type: ignore[attr-defined]

    def requested(changes: dict[str, Any]) -> str:
        client.app.state.planning_cache = ShortCache()  # type: ignore[attr-defined]  # what was found is taken for a second
        answer = client.post(f"{PATH}/with-accumulation", json={**JOB, **changes})
        return "" if answer.status_code == 202 else str(answer.json()["detail"])

    assert requested({"training_config": {"method": "qlora"}}) == ""  # nobody knows of any worker
    beat(database, "worker-1", "here", [CPU])
    assert "qlora needs an NVIDIA GPU" in requested({"training_config": {"method": "qlora"}})
    flash = {"training_config": {"attention": "flash_attention_2"}}
    assert "flash_attention_2 needs an NVIDIA GPU" in requested(flash)
    assert "no worker has a GPU" in requested({"gpu_ids": [0]})
    beat(database, "worker-2", "there", [GPU])
    assert requested({"gpu_ids": [2]}) == ""
    assert "Available: 2" in requested({"gpu_ids": [0]})
    beat(database, "worker-3", "elsewhere", [GPU])
    assert "numbered by machine" in requested({"gpu_ids": [2]})


CPU = {"id": "cpu", "name": "CPU", "memory_bytes": 2**34, "kind": "cpu"}
GPU = {"id": 2, "name": "NVIDIA L4", "memory_bytes": 2**34, "kind": "cuda"}


def beat(database: Database, worker_id: str, hostname: str, devices: list[dict[str, Any]]) -> None:
    with database.writing() as session:
        live_workers.beat(
            session, Worker(id=worker_id, hostname=hostname, started_at=1.0, devices=devices, running=[])
        )


def test_a_profile_is_listed_and_its_files_fetched(client: TestClient, settings: Settings) -> None:
    job = submit(client, profile=True)
    own = job["links"]["profile"]
    assert client.get(own).status_code == client.get(f"{own}/trace.json").status_code == 404
    folder = settings.runs_dir / job["id"] / "profile"
    folder.mkdir(parents=True)
    (folder / "trace.json").write_text('{"traceEvents": []}')
    operator = {"name": "aten::mm", "calls": 3, "seconds": 0.2, "own_seconds": 0.1, "device_seconds": None}
    (folder / "operators.json").write_text(json.dumps({"data": [operator]}))
    found = client.get(own).json()
    assert (found["operators"], found["files"]) == ([operator], ["trace.json"])
    assert client.get(f"{own}/trace.json").json() == {"traceEvents": []}
    assert client.get(f"{own}/operators.json").status_code == 422
    assert client.get(f"{own}/..%2Fspec.json").status_code in (404, 422)
    assert submit(client)["links"]["profile"] is None


def test_evaluations_are_among_the_metrics(client: TestClient) -> None:
    job_id = submit(client)["id"]
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    with database.writing() as session:
        for step, loss, accuracy in ((2, 3.5, 0.25), (4, None, None)):
            data = {"step": step, "loss": loss, "token_accuracy": accuracy}
            record_event(session, session.get_one(Job, job_id), "evaluation", "evaluated", data=data)
    found = client.get(f"{PATH}/{job_id}/metrics").json()["evaluations"]
    unmeasured = dict.fromkeys(("exact_match", "rewards", "metrics"))
    assert found == [
        {"step": 2, "loss": 3.5, "token_accuracy": 0.25, **unmeasured},
        {"step": 4, "loss": None, "token_accuracy": None, **unmeasured},
    ]  # fmt: skip
    assert client.get(f"{PATH}/{job_id}/metrics?from_step=3").json()["evaluations"] == found[1:]


def test_the_event_stream_reports_progress_within_a_window(client: TestClient) -> None:
    job_id = submit(client)["id"]
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    fence = Fence(job_id, 1, "worker-1")
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 60.0) == fence
        own = {"step": 3, "micro_step": 40, "accumulation_step": 8, "within_window": True}
        queue.note_progress(session, fence, own, 0)
    told = []
    with client.stream("GET", f"{PATH}/{job_id}/events", headers={"Accept": "text/event-stream"}) as answer:
        for line in answer.iter_lines():
            told.append(line)
            if line == "event: progress":
                with database.writing() as session:
                    queue.fail(session, fence, Failure(code="x", message="x", permanent=True))
    at = told.index("event: progress")
    progress = {"attempt": 1, "step": 3, "micro_step": 40, "accumulation_step": 8}
    assert json.loads(told[at + 1].removeprefix("data: ")) == progress
    assert told[at + 2] == ""


@pytest.mark.parametrize("field", [{"gradient_scaling": True}, {"lr_scaling": "linear"}])
def test_learning_rate_scaling_requires_base_batch_size(client: TestClient, field: dict[str, Any]) -> None:
    refused = client.post(f"{PATH}/with-accumulation", json={**JOB, **field})
    assert refused.status_code == 422
    assert "base_batch_size" in refused.json()["detail"]
    assert submit(client, **field, base_batch_size=16)["learning_rate"] != 5e-5
    assert submit(client, gradient_scaling=False)["learning_rate"] == 5e-5


def test_recommendations_for_a_job_use_its_sample_length(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:  # on a CPU
        micro = []
        for length in (16, 512):
            data = {"texts": ["one", "two"], "max_length": length}
            job = submit(client, dataset_config=data, target_effective_batch_size=16)
            query = {"training_id": job["id"]}
            found = client.get("/gradient-accumulation/performance/recommendations", params=query).json()
            micro.append(found["micro_batch_size"]["value"])
    assert micro == [16, 2]
