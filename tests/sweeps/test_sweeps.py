"""Sweeps over HTTP: a job for each combination, all or none, and a table that names the best."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.requests import key_for, service

SWEEPS, JOBS = "/gradient-accumulation/sweeps", "/gradient-accumulation/training"
RATES = {"learning_rate": [1e-5, 1e-4, 1e-3], "effective_batch_size": [8, 16]}


@pytest.fixture
def body(client: TestClient) -> dict[str, Any]:
    lines = b"".join(b'{"text": "sample text %d"}\n' % number for number in range(40))
    answer = client.post("/v1/files", files={"file": ("data.jsonl", lines)}, data={"purpose": "fine-tune"})
    return {
        "model_name": "accrue/tiny-gpt2",
        "dataset_config": {"file_id": answer.json()["id"], "max_length": 64, "validation_split": 0.2},
        "training_config": {"max_steps": 5},
        "name": "rates",
        "vary": RATES,
    }


def create(client: TestClient, body: dict[str, Any], **changes: Any) -> Any:
    answer = client.post(SWEEPS, json={**body, **changes})
    assert answer.status_code == 202, answer.text
    return answer.json()


def end(database: Database, job_id: str, loss: float, validation_loss: float | None) -> None:
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        job.status, job.progress = "succeeded", {"step": 5, "steps_total": 5, "loss_ema": loss}
        job.result = {"files": [], "eval_loss": validation_loss}


def test_one_request_creates_a_job_for_each_combination(client: TestClient, body: dict[str, Any]) -> None:
    sweep = create(client, body)
    assert (sweep["name"], sweep["vary"]) == ("rates", ["learning_rate", "effective_batch_size"])
    assert [tuple(job["values"].values()) for job in sweep["jobs"]] == [
        (1e-5, 8), (1e-5, 16), (1e-4, 8), (1e-4, 16), (1e-3, 8), (1e-3, 16),
    ]  # fmt: skip
    assert (sweep["best"], sweep["decided_by"]) == (None, None)
    for each in sweep["jobs"]:
        job = client.get(f"{JOBS}/{each['training_id']}").json()
        assert job["learning_rate"] == each["values"]["learning_rate"]
        assert job["effective_batch_size"] == each["values"]["effective_batch_size"]
        assert job["metadata"]["sweep"] == "rates"
    listed = client.get(JOBS, params={"metadata[sweep]": "rates"}).json()["data"]
    assert {job["id"] for job in listed} == {job["training_id"] for job in sweep["jobs"]}
    assert client.get(f"{SWEEPS}/rates").json() == sweep
    [summary] = client.get(SWEEPS).json()["data"]
    assert (summary["name"], summary["jobs"]) == ("rates", 6)


def test_the_lowest_validation_loss_is_the_best(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    ids = [job["training_id"] for job in create(client, body)["jobs"]]
    database = Database(settings.resolved_database_url)
    end(database, ids[0], 1.0, 3.0)
    end(database, ids[1], 2.0, 2.5)
    end(database, ids[2], 0.5, None)
    sweep = client.get(f"{SWEEPS}/rates").json()
    database.close()
    assert (sweep["best"], sweep["decided_by"]) == (ids[1], "validation_loss")
    assert [job["validation_loss"] for job in sweep["jobs"]] == [3.0, 2.5, None, None, None, None]
    assert [job["step"] for job in sweep["jobs"]] == [5, 5, 5, 0, 0, 0]


def test_without_validation_data_the_training_loss_decides(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    ids = [job["training_id"] for job in create(client, body)["jobs"]]
    database = Database(settings.resolved_database_url)
    end(database, ids[3], 1.0, None)
    end(database, ids[4], 0.5, None)
    sweep = client.get(f"{SWEEPS}/rates").json()
    database.close()
    assert (sweep["best"], sweep["decided_by"]) == (ids[4], "loss")


@pytest.mark.parametrize(
    ("vary", "training", "field", "values"),
    [
        ({"lora_rank": [4, 8]}, {"method": "lora"}, "method", [{"lora": {"r": 4}}, {"lora": {"r": 8}}]),
        (
            {"lora_rank": [4, 8]},
            {"method": {"lora": {"alpha": 64, "r": 2}}},
            "method",
            [{"lora": {"alpha": 64, "r": 4}}, {"lora": {"alpha": 64, "r": 8}}],
        ),
        ({"training_config.weight_decay": [0.0, 0.1]}, {}, "weight_decay", [0.0, 0.1]),
        ({"training_config.optimizer": ["adamw", "lion"]}, {}, "optimizer", ["adamw", "lion"]),
        (
            {"training_config.method": ["full", {"lora": {"r": 4}}]}, {},
            "method", ["full", {"lora": {"r": 4}}],
        ),
    ],
)  # fmt: skip
def test_any_field_can_vary(
    client: TestClient, body: dict[str, Any], vary: Any, training: Any, field: str, values: list[Any]
) -> None:
    training = {**body["training_config"], **training}
    sweep = create(client, body, vary=vary, training_config=training)
    jobs = [client.get(f"{JOBS}/{each['training_id']}").json() for each in sweep["jobs"]]
    for job, value in zip(jobs, values, strict=True):
        found = job["training_config"][field]
        if isinstance(value, dict):
            assert value["lora"].items() <= found["lora"].items()
        else:
            assert found == value


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"vary": {}}, "vary", "at least 1"),
        ({"vary": {"learning_rate": []}}, "vary.learning_rate", "at least 1"),
        ({"vary": {"learning_rate": [1e-4]}}, "vary", "would give 1"),
        ({"vary": {"training_config.seed": list(range(11)), "training_config.epochs": list(range(1, 11))}},
         "vary", "would give 110"),
        ({"vary": {"learning_rate": [1e-4, 1e-4]}}, "vary.learning_rate", "a value twice"),
        ({"vary": {"learning_rate": [1e-4, -1]}}, "vary",
         "With learning_rate -1: training_config.learning_rate"),
        ({"vary": {"learning_rat": [1e-4, 1e-3]}}, "vary", "learning_rat: there is no such"),
        ({"vary": {"learning_rate": [1e-4, 1e-3], "training_config.learning_rate": [1e-5, 1e-6]}}, "vary",
         "training_config.learning_rate varies twice"),
        ({"vary": {"training_config.seed.x": [1, 2]}, "training_config": {"seed": 3}},
         "vary.training_config.seed.x", "seed is 3, which has no such field"),
        ({"vary": {"lora_rank": [4, 8]}}, "vary.lora_rank", 'needs training_config.method "lora"'),
        ({"vary": {"metadata.a": ["1", "2"]}}, "vary.metadata.a", "cannot vary"),
        ({"vary": {"dry_run": [True, False]}}, "vary.dry_run", "cannot vary"),
        ({"metadata": {"sweep": "x"}}, "metadata", "a sweep adds sweep"),
        ({"metadata": {str(n): "x" for n in range(15)}}, "metadata", "at most 14 other keys"),
        ({"name": "../x"}, "name", ""),
        ({"dataset_config": {"texts": ["a", "b"]}}, "dataset_config.file_id", "upload it"),
        ({"vary": {"model_name": ["accrue/tiny-gpt2", "nobody/nothing"]}}, None, "nothing"),
        ({"vary": {"training_config.method": ["full", "x" * 600]}}, "vary", "characters"),
    ],
)  # fmt: skip
def test_mistakes_are_explained_and_nothing_is_stored(
    client: TestClient, body: dict[str, Any], changes: dict[str, Any], field: str | None, told: str
) -> None:
    answer = client.post(SWEEPS, json={**body, **changes})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert told in error["message"]
    if field is not None:
        assert error["param"] == field
    assert client.get(JOBS).json()["data"] == []
    assert client.get(SWEEPS).json()["data"] == []


def test_a_name_is_used_once_and_a_repeated_request_gets_the_first_answer(
    client: TestClient, body: dict[str, Any]
) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post(SWEEPS, json=body, headers=headers)
    again = client.post(SWEEPS, json=body, headers=headers)
    assert first.json() == again.json()
    other = client.post(SWEEPS, json=body)
    assert other.status_code == 409
    assert "choose another name" in other.json()["error"]["message"]
    assert len(client.get(JOBS).json()["data"]) == 6
    unnamed = {name: value for name, value in body.items() if name != "name"}
    assert create(client, unnamed)["name"].startswith("sweep-")


def test_a_dry_run_shows_every_plan_and_stores_nothing(client: TestClient, body: dict[str, Any]) -> None:
    answer = client.post(SWEEPS, json={**body, "dry_run": True})
    assert answer.status_code == 200
    jobs = answer.json()["jobs"]
    assert [job["plan"]["effective_batch_size"] for job in jobs] == [8, 16, 8, 16, 8, 16]
    assert client.get(JOBS).json()["data"] == []


def test_the_limit_of_waiting_jobs_holds_for_the_whole_sweep(settings: Settings) -> None:
    with service(settings, max_queued_jobs=4) as (client, key):
        lines = {"file": ("data.jsonl", b'{"text": "sample text"}\n' * 20)}
        file = client.post("/v1/files", files=lines, data={"purpose": "fine-tune"}, headers=key).json()["id"]
        body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file}, "vary": RATES}
        answer = client.post(SWEEPS, json=body, headers=key)
        assert answer.status_code == 429, answer.text
        assert client.get(JOBS, headers=key).json()["data"] == []
        few = {**body, "vary": {"learning_rate": [1e-4, 1e-3]}}
        assert client.post(SWEEPS, json=few, headers=key).status_code == 202


def test_sweeps_belong_to_their_key(settings: Settings) -> None:
    with service(settings) as (client, key):
        other = key_for(client.app.state.database)  # type: ignore[attr-defined]
        lines = {"file": ("data.jsonl", b'{"text": "sample text"}\n' * 20)}
        file = client.post("/v1/files", files=lines, data={"purpose": "fine-tune"}, headers=key).json()["id"]
        body = {
            "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file}, "name": "mine",
            "vary": {"learning_rate": [1e-4, 1e-3]},
        }  # fmt: skip
        assert client.post(SWEEPS, json=body, headers=key).status_code == 202
        assert client.get(f"{SWEEPS}/mine", headers=other).status_code == 404
        assert client.get(SWEEPS, headers=other).json()["data"] == []
        assert client.get(f"{SWEEPS}/mine", headers=key).status_code == 200


def test_metadata_that_a_client_has_written_does_no_harm(client: TestClient, body: dict[str, Any]) -> None:
    create(client, body, vary={"learning_rate": [1e-4, 1e-3]})
    for values in ("[", "[1]", '{"x": 1}'):
        metadata = {"sweep": "rates", "sweep_values": values}
        job = {name: value for name, value in body.items() if name not in ("name", "vary")}
        answer = client.post(f"{JOBS}/with-accumulation", json={**job, "metadata": metadata})
        assert answer.status_code == 202, answer.text
    sweep = client.get(f"{SWEEPS}/rates").json()
    assert [job["values"] for job in sweep["jobs"]] == [
        {"learning_rate": 1e-4}, {"learning_rate": 1e-3}, {}, {}, {"x": 1},
    ]  # fmt: skip
