"""Answers that a review found wrong or missing."""

import csv
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.database import Database
from app.planning.devices import GIB
from tests.routes.test_training import JOB, PATH, submit

CALCULATE = "/gradient-accumulation/calculate-batch-size"


@pytest.mark.parametrize("gpus", [["A100-80GB", "24GB"], ["24GB", "A100-80GB"], ["16GB", "24GB", "80GB"]])
def test_what_unequal_devices_take_is_held_against_their_own_memory(
    client: TestClient, gpus: list[str]
) -> None:
    asked = {"model_name": "gpt2", "gpus": gpus, "target_effective_batch_size": 512, "wait_seconds": 0}
    answer = client.post(CALCULATE, json=asked).json()
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
    assert "not the training of the effective batch" in answer.json()["detail"]


def test_accumulation_need_not_be_logged(client: TestClient) -> None:
    assert submit(client, log_accumulation=False)["config"]["log_accumulation"] is False


def test_a_target_in_the_query_goes_by_either_name(client: TestClient) -> None:
    query = {"model_name": "gpt2", "gpus": "24GB", "wait_seconds": 0, "target_effective_batch_size": 48}
    assert client.get(CALCULATE, params=query).json()["effective_batch_size"] == 48
    assert client.get(CALCULATE, params={**query, "target_batch_size": 48}).status_code == 422


@pytest.mark.parametrize(
    ("size", "parameters"), [("2b", 2 * 10**9), ("350M", 350 * 10**6), ("Small", 125 * 10**6)]
)
def test_sizes_as_people_write_them(client: TestClient, size: str, parameters: int) -> None:
    answer = client.get(f"/gradient-accumulation/performance/recommendations?model_size={size}")
    assert answer.json()["parameters"] == parameters


def test_no_other_name_is_suggested_than_the_one_given(client: TestClient) -> None:
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
        ({"messages": [CHAT, CHAT[:1]]}, "messages.1 has no turn of the assistant"),
        ({"messages": [[]]}, "messages"), ({"prompts": []}, "prompts is empty"),
        ({"prompts": [{"prompt": "a"}]}, "completion"), ({"texts": ["a"], "messages": [CHAT]}, "exactly one"),
        ({"messages": [CHAT], "format": "text"}, "of format messages"),
        ({"prompts": [{"prompt": "a", "completion": "b", "label": 1}]}, "label"),
    ],
)  # fmt: skip
def test_inline_samples_that_are_none(client: TestClient, given: dict[str, Any], told: str) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "dataset_config": given})
    assert answer.status_code == 422
    assert told in answer.text


def test_every_step_is_an_event_and_a_row_with_its_validation_loss(client: TestClient) -> None:
    from app.events import tell_of
    from tests.workers.test_ingest import line
    from workers.ingest import _store_metrics

    job = submit(client)["id"]
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    now = time.time()
    with database.writing() as session:
        _store_metrics(
            session, job,
            [line(step, loss=1 / step).model_copy(update={"time": now + step}) for step in range(1, 31)],
        )  # fmt: skip
        tell_of(session, job, 1, "evaluation", "evaluated", data={"step": 20, "loss": 0.25, "best": True})
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
    assert len(events) == 30 + 2
    rows = list(csv.DictReader(client.get(f"{PATH}/{job}/metrics?format=csv").text.splitlines()))
    assert [row["valid_loss"] for row in rows if row["valid_loss"]] == ["0.25"]
    assert rows[19]["valid_loss"] == "0.25"
    assert len(client.get(f"{PATH}/{job}/log?from_step=28").text.splitlines()) == 3
