"""The same request twice, and a hundred times at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from transformers import GPT2Config

from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import Worker
from tests.harness.requests import JOB, PATH, key_for
from tests.harness.submissions import succeeded

KEY = {"Idempotency-Key": "once"}
FILE = {"file": ("data.jsonl", b'{"text": "one"}\n')}
REQUESTS: dict[str, dict[str, Any]] = {
    f"{PATH}/with-accumulation": {"json": JOB},
    f"{PATH}/large-batch": {"json": {**JOB, "accumulation_steps": None}},
    "/gradient-accumulation/config": {"json": {"target_effective_batch_size": 8}},
    "/v1/files": {"files": FILE, "data": {"purpose": "fine-tune"}},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_repeated_request_is_executed_once_and_gets_the_same_response(
    client: TestClient, path: str
) -> None:
    first = client.post(path, **REQUESTS[path], headers=KEY)
    again = client.post(path, **REQUESTS[path], headers=KEY)
    assert first.is_success
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    other = client.post(path, **REQUESTS[path], headers={"Idempotency-Key": "another"})
    assert other.json() != first.json()


def test_an_openai_job_is_made_once(client: TestClient) -> None:
    file_id = client.post("/v1/files", **REQUESTS["/v1/files"]).json()["id"]
    requested = {"model": "accrue/tiny-gpt2", "training_file": file_id}
    answers = [client.post("/v1/fine_tuning/jobs", json=requested, headers=KEY).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(client.get(PATH).json()["data"]) == 1


def test_an_export_is_made_once(client: TestClient, database: Database, settings: Settings) -> None:
    job_id, folder = succeeded(database, settings)
    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64).save_pretrained(folder)
    with database.writing() as session:  # an export needs a worker that is alive
        worker = {"hostname": "h", "started_at": database_now(), "devices": [], "running": []}
        session.add(Worker(id="worker-1", heartbeat_at=database_now(), **worker))
    path = f"{PATH}/{job_id}/exports"
    answers = [client.post(path, json={"format": "merged"}, headers=KEY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202], answers[0].text
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotency-replayed"] == "true"
    made = answers[0].json()
    assert client.get(path).json() == {
        "object": "list", "data": [made], "has_more": False, "first_id": made["id"], "last_id": made["id"],
    }  # fmt: skip
    assert isinstance(made["created_at"], int)


def test_an_idempotency_key_is_rejected_for_a_different_request(client: TestClient) -> None:
    path = f"{PATH}/with-accumulation"
    client.post(path, json=JOB, headers=KEY)
    refused = client.post(path, json={**JOB, "user_id": 124}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "Idempotency-Key")
    elsewhere = client.post("/gradient-accumulation/config", json={}, headers=KEY)
    assert elsewhere.status_code == 422
    assert len(client.get(PATH).json()["data"]) == 1


def test_a_corrected_request_may_reuse_the_idempotency_key(client: TestClient) -> None:
    path = f"{PATH}/with-accumulation"
    assert client.post(path, json={**JOB, "model_name": "nobody/knows"}, headers=KEY).status_code == 422
    assert client.post(path, json=JOB, headers=KEY).status_code == 202


def test_idempotency_keys_are_separate_per_api_key(client: TestClient) -> None:
    database = client.app.state.database  # type: ignore[attr-defined]
    path = f"{PATH}/with-accumulation"
    made = {client.post(path, json=JOB, headers={**key_for(database), **KEY}).json()["id"] for _ in range(2)}
    assert len(made) == 2


def test_a_hundred_concurrent_repeats_create_one_job(client: TestClient, settings: Settings) -> None:
    def post(number: int) -> Any:
        return client.post(f"{PATH}/with-accumulation", json=JOB, headers=KEY)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(100)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(client.get(PATH).json()["data"]) == 1
    assert len(list(settings.files_dir.iterdir())) == 1


def test_an_idempotency_key_that_is_too_long_is_named(client: TestClient) -> None:
    answer = client.post("/gradient-accumulation/config", json={}, headers={"Idempotency-Key": "k" * 300})
    assert answer.status_code == 422
    assert [problem["field"] for problem in answer.json()["errors"]] == ["Idempotency-Key"]
