"""The same request twice, and a hundred times at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import Settings
from tests.harness.requests import JOB, PATH, key_for

KEY = {"Idempotency-Key": "once"}
FILE = {"file": ("data.jsonl", b'{"text": "one"}\n')}
REQUESTS: dict[str, dict[str, Any]] = {
    f"{PATH}/with-accumulation": {"json": JOB},
    f"{PATH}/large-batch": {"json": {**JOB, "accumulation_steps": None}},
    "/gradient-accumulation/config": {"json": {"target_effective_batch_size": 8}},
    "/v1/files": {"files": FILE, "data": {"purpose": "fine-tune"}},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_same_request_again_is_answered_again_and_done_once(client: TestClient, path: str) -> None:
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


def test_a_key_is_for_one_request(client: TestClient) -> None:
    path = f"{PATH}/with-accumulation"
    client.post(path, json=JOB, headers=KEY)
    refused = client.post(path, json={**JOB, "user_id": 124}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "Idempotency-Key")
    elsewhere = client.post("/gradient-accumulation/config", json={}, headers=KEY)
    assert elsewhere.status_code == 422
    assert len(client.get(PATH).json()["data"]) == 1


def test_what_was_refused_may_be_mended_under_the_same_key(client: TestClient) -> None:
    path = f"{PATH}/with-accumulation"
    assert client.post(path, json={**JOB, "model_name": "nobody/knows"}, headers=KEY).status_code == 422
    assert client.post(path, json=JOB, headers=KEY).status_code == 202


def test_another_s_key_of_the_same_name_is_another(client: TestClient) -> None:
    database = client.app.state.database  # type: ignore[attr-defined]
    path = f"{PATH}/with-accumulation"
    made = {client.post(path, json=JOB, headers={**key_for(database), **KEY}).json()["id"] for _ in range(2)}
    assert len(made) == 2


def test_a_hundred_at_once_make_one_job(client: TestClient, settings: Settings) -> None:
    def post(number: int) -> Any:
        return client.post(f"{PATH}/with-accumulation", json=JOB, headers=KEY)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(100)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(client.get(PATH).json()["data"]) == 1
    assert len(list(settings.files_dir.iterdir())) == 1
