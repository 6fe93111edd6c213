"""Sweeps over HTTP: a job for each combination, all or none, and a table that names the best."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.models import starting_models
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job, StepMetric
from tests.harness.log_lines import line
from tests.harness.requests import key_for, service

SWEEPS, JOBS = "/gradient-accumulation/sweeps", "/gradient-accumulation/training"
RATES = {"learning_rate": [1e-5, 1e-4, 1e-3], "effective_batch_size": [8, 16]}


@pytest.fixture
def body(client: TestClient) -> dict[str, Any]:
    lines = b"".join(
        b'{"text": "sample text %d", "label": %d}\n' % (number, number % 2) for number in range(40)
    )
    answer = client.post("/v1/files", files={"file": ("data.jsonl", lines)}, data={"purpose": "fine-tune"})
    return {
        "model_name": "accrue/tiny-gpt2",
        "dataset_config": {"file_id": answer.json()["id"], "max_length": 64, "validation_split": 0.2},
        "training_config": {"max_steps": 5, "objective": "sft"},
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
    data = {**body["dataset_config"], "validation_split": None}
    ids = [job["training_id"] for job in create(client, body, dataset_config=data)["jobs"]]
    database = Database(settings.resolved_database_url)
    end(database, ids[3], 1.0, None)
    end(database, ids[4], 0.5, None)
    sweep = client.get(f"{SWEEPS}/rates").json()
    database.close()
    assert (sweep["best"], sweep["decided_by"]) == (ids[4], "loss")


def test_the_training_loss_that_decides_is_of_equally_many_samples(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    """A moving average over few steps of a large batch still has the first steps in it."""
    data = {**body["dataset_config"], "validation_split": None}
    ids = [job["training_id"] for job in create(client, body, dataset_config=data)["jobs"]][:2]
    losses = {ids[0]: [5.0 - n / 20 for n in range(80)], ids[1]: [4.8 - n / 10 for n in range(40)]}
    database = Database(settings.resolved_database_url)
    for job_id, samples in zip(ids, (8, 16), strict=True):
        end(database, job_id, {ids[0]: 1.0, ids[1]: 2.0}[job_id], None)
        with database.writing() as session:
            for step, loss in enumerate(losses[job_id], 1):
                values = line(step, loss=loss).model_dump() | {"samples": samples}
                session.add(StepMetric(job_id=job_id, **values))
    sweep = client.get(f"{SWEEPS}/rates").json()
    database.close()
    shown = [job["loss"] for job in sweep["jobs"][:2]]
    assert shown == [
        pytest.approx(sum(losses[ids[0]][-20:]) / 20),
        pytest.approx(sum(losses[ids[1]][-10:]) / 10),
    ]
    assert (sweep["best"], sweep["decided_by"]) == (ids[1], "loss")


def test_a_failed_job_does_not_change_how_the_others_are_compared(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    data = {**body["dataset_config"], "validation_split": None}
    ids = [job["training_id"] for job in create(client, body, dataset_config=data)["jobs"]][::2]
    losses = {ids[0]: [3.0] * 99 + [1.0], ids[1]: [2.0] * 99 + [2.5], ids[2]: [9.0]}
    database = Database(settings.resolved_database_url)
    for job_id in ids:
        end(database, job_id, 1.0, None)
        with database.writing() as session:
            for step, loss in enumerate(losses[job_id], 1):
                values = line(step, loss=loss).model_dump() | {"samples": 8 * (step > 1 or job_id != ids[2])}
                session.add(StepMetric(job_id=job_id, **values))
    with database.writing() as session:
        session.get_one(Job, ids[2]).status = "failed"
        nothing = line(2, loss=9.0).model_dump() | {"samples": 0}  # as only a hostile trainer would write
        session.add(StepMetric(job_id=ids[2], **nothing))
    sweep = client.get(f"{SWEEPS}/rates").json()
    database.close()
    shown = {job["training_id"]: job["loss"] for job in sweep["jobs"]}
    assert shown[ids[0]] == pytest.approx((9 * 3.0 + 1.0) / 10)  # of ten windows
    assert shown[ids[2]] == 1.0  # the moving average
    assert sweep["best"] == ids[1]


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
        ({"vary": {"training_config.weight_decay": [0, 0.0]}}, "vary.training_config.weight_decay", "twice"),
        ({"vary": {"learning_rate": [1e-4, -1]}}, "vary",
         "With learning_rate -1: training_config.learning_rate"),
        ({"vary": {"learning_rat": [1e-4, 1e-3]}}, "vary", "learning_rat: there is no such"),
        ({"vary": {"learning_rate": [1e-4, 1e-3], "training_config.learning_rate": [1e-5, 1e-6]}}, None,
         "learning_rate and training_config.learning_rate set the same thing"),
        ({"vary": {"lora_rank": [4, 8], "training_config.method": ["lora", "qlora"]}},
         "vary.training_config.method", "lora_rank and training_config.method set the same thing"),
        ({"vary": {"lora_rank": [4, 8], "training_config.method.qlora.r": [1, 2]}}, None,
         "set the same thing"),
        ({"vary": {"lora_rank": [4], "training_config": [1, 2]}}, None, "set the same thing"),
        ({"vary": {"training_config.optimizer_args.eps": [1e-8, 1e-7],
                   "training_config.optimizer_args": [{}]}}, None, "set the same thing"),
        ({"vary": {"training_config.method.lora.alpha": [4, 8]}}, None,
         'needs training_config.method "lora"'),
        ({"vary": {"training_config.method.lora.alpha": [4, 8]}, "training_config": {"method": "qlora"}},
         None,
         'needs training_config.method "lora"'),
        ({"vary": {"dataset_config": [{"texts": ["a"]}, {"texts": ["b"]}]}}, "dataset_config.file_id",
         "upload the data"),
        ({"vary": {"training_config": [{"max_steps": 1}, 7]}}, "vary", "training_config"),
        ({"vary": {"training_config.seed.x": [1, 2]}, "training_config": {"seed": 3}},
         "vary.training_config.seed.x", "seed is 3, which has no such field"),
        ({"vary": {"lora_rank": [4, 8]}}, "vary.lora_rank", 'needs training_config.method "lora"'),
        ({"vary": {"metadata.a": ["1", "2"]}}, "vary.metadata.a", "the same for all jobs"),
        ({"vary": {"dry_run": [True, False]}}, "vary.dry_run", "the same for all jobs"),
        ({"metadata": {"sweep": "x"}}, "metadata", "a sweep adds sweep"),
        ({"metadata": {str(n): "x" for n in range(15)}}, "metadata", "at most 14 other keys"),
        ({"name": "../x"}, "name", ""),
        ({"dataset_config": {"texts": ["a", "b"]}}, "dataset_config.file_id", "upload the data"),
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
        unknown = client.get(f"{SWEEPS}/mine", headers=other)
        assert unknown.status_code == 404
        assert "GET /gradient-accumulation/sweeps, or accrue sweeps, lists them" in unknown.json()["detail"]
        assert client.get(SWEEPS, headers=other).json()["data"] == []
        assert client.get(f"{SWEEPS}/mine", headers=key).status_code == 200


def test_metadata_that_a_client_has_written_does_no_harm(client: TestClient, body: dict[str, Any]) -> None:
    create(client, body, vary={"learning_rate": [1e-4, 1e-3]})
    job = {name: value for name, value in body.items() if name not in ("name", "vary")}
    written = ("[", "[1]", '{"x": 1}', '{"x": "\\ud800"}', '{"x": NaN}', '{"x": 1e999}', "[" * 500)
    for values in written:
        metadata = {"sweep": "rates", "sweep_values": values}
        answer = client.post(f"{JOBS}/with-accumulation", json={**job, "metadata": metadata})
        assert answer.status_code == 202, answer.text
    for metadata in ({"sweep": "rates"}, {"sweep": "of my own", "sweep_values": "{}"}):
        answer = client.post(f"{JOBS}/with-accumulation", json={**job, "metadata": metadata})
        assert answer.status_code == 202, answer.text
    sweep = client.get(f"{SWEEPS}/rates").json()
    assert [job["values"] for job in sweep["jobs"]] == [
        {"learning_rate": 1e-4}, {"learning_rate": 1e-3}, {}, {}, {"x": 1}, {}, {}, {}, {},
    ]  # fmt: skip
    [summary] = client.get(SWEEPS).json()["data"]
    assert (summary["name"], summary["jobs"]) == ("rates", 9)


def test_an_option_of_the_method_can_vary_beside_its_rank(client: TestClient, body: dict[str, Any]) -> None:
    for method in ("lora", {"lora": {"dropout": 0.1}}):
        sweep = create(
            client, body, name=None, training_config={"max_steps": 5, "method": method},
            vary={"lora_rank": [4], "training_config.method.lora.alpha": [8, 16]},
        )  # fmt: skip
        found = [client.get(f"{JOBS}/{job['training_id']}").json() for job in sweep["jobs"]]
        options = [job["training_config"]["method"]["lora"] for job in found]
        assert [(own["r"], own["alpha"]) for own in options] == [(4, 8), (4, 16)]


def test_other_names_of_a_field_are_replaced(client: TestClient, body: dict[str, Any]) -> None:
    sweep = create(
        client, body, training_config={"max_steps": 3}, target_batch_size=4,
        vary={"training_config.steps": [5, 6], "effective_batch_size": [8, 16]},
    )  # fmt: skip
    jobs = [client.get(f"{JOBS}/{each['training_id']}").json() for each in sweep["jobs"]]
    found = [(job["training_config"]["max_steps"], job["effective_batch_size"]) for job in jobs]
    assert found == [(5, 8), (5, 16), (6, 8), (6, 16)]
    again = {**body, "name": "x", "vary": {"training_config.steps": [1], "training_config.max_steps": [2, 3]}}
    assert "set the same thing" in client.post(SWEEPS, json=again).json()["error"]["message"]


def test_a_job_that_is_trained_again_takes_the_place_of_the_failed_one(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    first = create(client, body, vary={"learning_rate": [1e-4, 1e-3]})["jobs"][0]["training_id"]
    database = Database(settings.resolved_database_url)
    with database.writing() as session:
        session.get_one(Job, first).status = "failed"
    again = client.post(f"{JOBS}/{first}/retry").json()["id"]
    end(database, again, 1.0, 2.0)
    database.close()
    sweep = client.get(f"{SWEEPS}/rates").json()
    assert [job["values"]["learning_rate"] for job in sweep["jobs"]] == [1e-4, 1e-3]
    assert sweep["jobs"][0]["training_id"] == again == sweep["best"]
    assert client.get(SWEEPS).json()["data"][0]["jobs"] == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vary": {"training_config.seed": [1, 2]}}, "since held-out samples vary"),
        ({"vary": {"dataset_config.validation_split": [0.1, 0.2]}}, "since held-out samples vary"),
        ({"vary": {"dataset_config.max_length": [32, 64]}}, "since lengths vary"),
        ({"vary": {"training_config.objective": ["sft", "classification"]}}, "since objectives vary"),
        ({"vary": {"dataset_config.overlength": ["truncate", "split"]}}, "treatments of long samples vary"),
        (
            {"vary": {"training_config.label_smoothing": [0.0, 0.4]}, "without": "validation_split"},
            "since amounts of label smoothing vary",
        ),
        ({"vary": {"training_config.seed": [1, 2]}, "without": "validation_split"}, None),
    ],
)
def test_losses_that_cannot_be_compared_name_no_best(
    client: TestClient, body: dict[str, Any], settings: Settings, changes: dict[str, Any], why: str | None
) -> None:
    without = changes.pop("without", None) if "without" in changes else None
    data = {name: value for name, value in body["dataset_config"].items() if name != without}
    ids = [job["training_id"] for job in create(client, {**body, "dataset_config": data}, **changes)["jobs"]]
    database = Database(settings.resolved_database_url)
    for job_id, loss in zip(ids, (2.0, 1.0), strict=True):
        end(database, job_id, loss, None if without else loss)
    database.close()
    sweep = client.get(f"{SWEEPS}/rates").json()
    if why is None:
        assert (sweep["best"], sweep["decided_by"], sweep["why_no_best"]) == (ids[1], "loss", None)
    else:
        assert sweep["best"] is None
        assert why in sweep["why_no_best"]


def test_a_diverged_job_does_not_make_the_training_loss_decide(
    client: TestClient, body: dict[str, Any], settings: Settings
) -> None:
    ids = [job["training_id"] for job in create(client, body)["jobs"]]
    database = Database(settings.resolved_database_url)
    end(database, ids[0], 0.1, None)
    database.close()
    sweep = client.get(f"{SWEEPS}/rates").json()
    assert (sweep["best"], sweep["decided_by"]) == (None, None)


def test_an_administrator_sees_each_owner_s_sweep_by_itself(settings: Settings) -> None:
    with service(settings) as (client, one):
        database = client.app.state.database  # type: ignore[attr-defined]
        other, admin = key_for(database), key_for(database, "admin")
        for number, key in enumerate((one, other), start=2):
            lines = {"file": ("data.jsonl", b'{"text": "sample text"}\n' * 20)}
            sent = client.post("/v1/files", files=lines, data={"purpose": "fine-tune"}, headers=key)
            body = {
                "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": sent.json()["id"]},
                "name": "rates", "vary": {"training_config.seed": list(range(number))},
            }  # fmt: skip
            assert client.post(SWEEPS, json=body, headers=key).status_code == 202
        listed = client.get(SWEEPS, headers=admin).json()["data"]
        assert [(each["name"], each["jobs"]) for each in listed] == [("rates", 3), ("rates", 2)]
        assert len(client.get(f"{SWEEPS}/rates", headers=admin).json()["jobs"]) == 3  # the newest
        assert len(client.get(f"{SWEEPS}/rates", headers=one).json()["jobs"]) == 2
        mine = {**body, "dataset_config": {"file_id": sent.json()["id"]}}
        assert client.post(SWEEPS, json=mine, headers=admin).status_code == 202
        assert len(client.get(SWEEPS, headers=admin).json()["data"]) == 3


def test_of_two_requests_at_once_with_one_name_one_is_refused(settings: Settings) -> None:
    with service(settings) as (client, key):
        lines = {"file": ("data.jsonl", b'{"text": "sample text"}\n' * 20)}
        file = client.post("/v1/files", files=lines, data={"purpose": "fine-tune"}, headers=key).json()["id"]
        body = {
            "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file}, "name": "rates",
            "vary": RATES,
        }  # fmt: skip
        with ThreadPoolExecutor(2) as threads:
            sent = [threads.submit(client.post, SWEEPS, json=body, headers=key) for _ in range(2)]
        assert sorted(each.result().status_code for each in sent) == [202, 409]
        assert len(client.get(JOBS, headers=key).json()["data"]) == 6


def test_the_model_is_looked_up_once(
    client: TestClient, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    own = starting_models.find_model

    def find(name: str, *rest: Any) -> Any:
        asked.append(name)
        return own(name, *rest)

    monkeypatch.setattr(starting_models, "find_model", find)
    create(client, body)
    assert asked == ["accrue/tiny-gpt2"]


def test_each_job_counts_toward_the_rate_limit(settings: Settings) -> None:
    with service(settings, rate_limit="20/minute") as (client, key):
        lines = {"file": ("data.jsonl", b'{"text": "sample text"}\n' * 20)}
        file = client.post("/v1/files", files=lines, data={"purpose": "fine-tune"}, headers=key).json()["id"]
        body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file}, "vary": RATES}
        answers = [client.post(SWEEPS, json=body, headers=key).status_code for _ in range(9)]
        assert answers[0] == 202
        assert 429 in answers[:8]
