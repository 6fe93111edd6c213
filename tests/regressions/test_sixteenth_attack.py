"""Regression tests for the sixteenth attack."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from app.contract.accumulation import AccumulationConfig, overridden
from app.contract.reports import Failure
from app.contract.spec import MAX_EVALUATIONS
from app.jobs import lifecycle, queue, transitions
from app.jobs.training_config import TrainingConfig
from app.planning.recommendations import recommended_rate
from app.results.checkpoints import list_checkpoints
from app.results.series import evaluations
from app.security.audit import MAX_REFUSED_PER_MINUTE, AuditLog, AuditRecord
from app.settings import Settings
from app.storage.database import Database, is_deadlock
from app.storage.tables import Job, JobEvent
from tests.harness.claims import claim
from tests.harness.requests import JOB, PATH
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted
from tests.harness.training import interrupted_at, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.slots import Slots
from workers.supervisor import Supervisor
from workers.training.attempt import _crash
from workers.training.exceptions import CannotTrain
from workers.training.models.base_model import stage_base_model
from workers.training.start import _check_token_ids

CONFIG = "/gradient-accumulation/config"


def test_a_job_evaluates_only_so_often(client: TestClient) -> None:
    training = {"max_steps": 100_000, "eval_every": 1}
    data = {**JOB["dataset_config"], "validation_split": 0.5}
    job = {**JOB, "training_config": training, "dataset_config": data}
    answer = client.post(f"{PATH}/with-accumulation", json=job)
    assert answer.status_code == 422
    assert "set eval_every to at least 20" in answer.text
    training["eval_every"] = 100_000 // MAX_EVALUATIONS
    assert client.post(f"{PATH}/with-accumulation", json={**job, "dry_run": True}).status_code == 200


def test_only_the_requested_evaluations_are_read(database: Database, settings: Settings) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        for number in range(1, 31):
            for kind, data in (
                ("evaluation", {"step": number, "loss": 1.0 / number}),
                ("checkpoint", {"step": number, "name": f"step-{number}"}),
            ):
                event = JobEvent(
                    job_id=job_id, id=f"ftevent-{kind}{number:03}", line=None, attempt=1, created_at=0.0,
                    level="info", type=kind, message="", data=data,
                )  # fmt: skip
                session.add(event)
    folder = settings.data_dir / "runs" / job_id / "checkpoints"
    for name in ("step-20", "step-30"):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text("{}")
    with database.reading() as session:
        some = evaluations(session, job_id, [3, 7])
        assert {step: found.loss for step, found in some.items()} == {3: 1.0 / 3, 7: 1.0 / 7}
        assert len(evaluations(session, job_id)) == 30
        found = list_checkpoints(session, settings, transitions.get(session, job_id))
    assert [(each.step, each.evaluation.loss) for each in found] == [(30, 1.0 / 30), (20, 1.0 / 20)]


@pytest.mark.parametrize(
    ("stored", "given", "status"),
    [
        ({"accumulation_scheduler": "linear", "accumulation_warmup_steps": 10},
         {"accumulation_scheduler": "constant"}, 202),
        ({"accumulation_scheduler": "noise_scale", "max_effective_batch_size": 64},
         {"noise_scale_every": None}, 422),
        ({"accumulation_scheduler": "noise_scale", "max_effective_batch_size": 64},
         {"clip_mode": "each_micro_batch"}, 422),
        ({"accumulation_steps": 2}, {"lr_scaling": "linear"}, 422),
    ],
)  # fmt: skip
def test_fields_that_contradict_a_stored_configuration_get_an_error(
    client: TestClient, stored: dict[str, Any], given: dict[str, Any], status: int
) -> None:
    config_id = client.post(CONFIG, json=stored).json()["config_id"]
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "config_id": config_id, **given})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "given", [{"clip_mode": "after_accumulation"}, {"clip_gradients_before_accumulation": False}]
)
def test_a_request_s_clip_mode_replaces_the_stored_one(client: TestClient, given: dict[str, Any]) -> None:
    stored = AccumulationConfig(clip_gradients_before_accumulation=True)
    assert stored.clip_mode == "each_micro_batch"
    kept = stored.model_dump(exclude_unset=True)
    assert AccumulationConfig(**overridden(kept, given)).clip_mode == "after_accumulation"
    created = client.post(CONFIG, json={"clip_gradients_before_accumulation": True}).json()
    changed = client.patch(f"{CONFIG}/{created['config_id']}", json=given).json()
    assert changed["config"]["clip_mode"] == "after_accumulation"


def test_one_request_with_two_clip_modes_is_rejected(client: TestClient) -> None:
    both = {"clip_gradients_before_accumulation": True, "clip_mode": "value"}
    assert client.post(CONFIG, json=both).status_code == 422


def test_a_field_under_two_names_is_rejected_in_a_change(client: TestClient) -> None:
    created = client.post(CONFIG, json={"micro_batch_size": 2}).json()
    both = {"batch_size": 4, "micro_batch_size": 8}
    assert client.patch(f"{CONFIG}/{created['config_id']}", json=both).status_code == 422


def uploaded(client: TestClient) -> str:
    content = b'{"text": "one"}\n{"text": "two"}\n'
    answer = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
    found: str = answer.json()["id"]
    return found


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
          "hyperparameters": {"n_epochs": 1}}, "n_epochs"),
        ({"seed": 1, "training_config": {"seed": 2}}, "seed"),
        ({"hyperparameters": {"n_epochs": 1}, "training_config": {"epochs": 2}}, "n_epochs"),
        ({"hyperparameters": {"batch_size": 8}, "accumulation": {"target_effective_batch_size": 4}},
         "batch_size"),
    ],
)  # fmt: skip
def test_contradictory_hyperparameters_are_rejected(
    client: TestClient, given: dict[str, Any], field: str
) -> None:
    request = {"model": "accrue/tiny-gpt2", "training_file": uploaded(client), **given}
    answer = client.post("/v1/fine_tuning/jobs", json=request)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]


def test_hyperparameters_count_beside_a_method_without_any(client: TestClient) -> None:
    request = {
        "model": "accrue/tiny-gpt2", "training_file": uploaded(client), "method": {"type": "supervised"},
        "hyperparameters": {"batch_size": 8, "n_epochs": 1, "learning_rate_multiplier": 3},
    }  # fmt: skip
    job = client.post("/v1/fine_tuning/jobs", json=request).json()
    assert job["hyperparameters"] == {"batch_size": 8, "n_epochs": 1, "learning_rate_multiplier": 3.0}


def test_the_automatic_rate_of_adapters_is_the_recommended_one(client: TestClient) -> None:
    training = {"method": "lora", "optimizer": "lion"}
    request = {"model": "accrue/tiny-gpt2", "training_file": uploaded(client), "training_config": training}
    job_id = client.post("/v1/fine_tuning/jobs", json=request).json()["id"]
    job = client.get(f"{PATH}/{job_id}").json()
    expected = recommended_rate(430_000, "lion", job["effective_batch_size"], adapters=True)
    assert job["learning_rate"] == pytest.approx(expected.value, rel=0.05)
    assert TrainingConfig(method="lora").learning_rate == 2e-4


def test_refused_requests_of_a_key_do_not_fill_the_disk(database: Database) -> None:
    log = AuditLog(database, 1.0)
    for status, kept in ((404, MAX_REFUSED_PER_MINUTE), (200, 300)):
        while not log._waiting.empty():
            log._waiting.get()
        for number in range(300):
            log.note(AuditRecord(0.0, "key-1", "POST", f"/a/{number}", status, "127.0.0.1", "r"))
        assert log._waiting.qsize() == kept


def test_a_deadlock_is_recognised() -> None:
    class Deadlock(Exception):
        sqlstate = "40P01"

    assert is_deadlock(OperationalError("", {}, Deadlock()))
    assert not is_deadlock(OperationalError("", {}, Exception()))
    assert not is_deadlock(None)


@pytest.mark.parametrize("damage", ["samples.arrow", "weights.npy", "sizes.npy", "prepared.json", "missing"])
def test_damaged_prepared_data_is_prepared_again(tmp_path: Path, damage: str) -> None:
    spec = make_spec(data=small_data(), max_steps=4)
    expected = weights_of(tmp_path / "expected", spec)
    run = create_run(tmp_path / "run", spec)
    interrupted_at(run, 6)
    if damage == "missing":
        (run.data / "samples.arrow").unlink()
    else:
        content = bytearray((run.data / damage).read_bytes())
        content[len(content) // 2] ^= 1
        (run.data / damage).write_bytes(content)
    run_to_end(create_run(tmp_path / "run", spec, attempt=2))
    found = weights(run)
    assert all((found[name] == weight).all() for name, weight in expected.items())


def weights_of(folder: Path, spec: Any) -> dict[str, Any]:
    run = create_run(folder, spec)
    run_to_end(run)
    return weights(run)


@pytest.mark.parametrize("ends", ["fail", "crash"])
def test_a_cancelled_job_that_fails_before_that_is_cancelled(database: Database, ends: str) -> None:
    job_id = submitted(database)
    fence = claim(database)
    assert fence is not None
    failure = Failure(code="timeout", message="The job ran too long.", permanent=True)
    with database.writing() as session:
        lifecycle.cancel(session, job_id)
    with database.writing() as session:
        session.get_one(Job, job_id).failures = queue.MAX_FAILURES - 1
        getattr(queue, ends)(session, fence, failure)
    with database.reading() as session:
        assert transitions.get(session, job_id).status == "cancelled"


def test_a_system_error_s_text_is_not_shown(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    secret = OSError(2, f"Failed to open local file '{tmp_path}/data'")
    assert str(tmp_path) not in _crash(secret, run).message
    assert os.strerror(2) in _crash(secret, run).message


def test_a_token_without_an_embedding_is_named(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=4))
    run_to_end(run)
    from transformers import AutoModelForCausalLM

    from workers.training.data.preparation import Samples

    model = AutoModelForCausalLM.from_pretrained(run.model)
    samples = Samples(run.data)
    _check_token_ids(samples, model, "a model")
    model.resize_token_embeddings(samples.largest_token())
    with pytest.raises(CannotTrain, match="embeddings"):
        _check_token_ids(samples, model, "a model")


def test_the_digests_of_prepared_data_are_stored(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=4))
    run_to_end(run)
    stored = json.loads((run.data / "prepared.json").read_text())
    assert set(stored["digests"]) == {"samples.arrow", "sizes.npy", "weights.npy"}


@pytest.mark.parametrize(
    "name",
    ["lock", "events.jsonl", "metrics.jsonl", "trainer.log", "model", "checkpoints", "data", ".", "base"],
)
def test_a_replaced_entry_of_a_run_directory_fails_the_job_at_once(
    database: Database, settings: Settings, name: str
) -> None:
    job_id = submitted(database)
    run = RunDirectory(settings.runs_dir / job_id)
    if name == ".":
        run.path.write_text("a file")
    else:
        run.path.mkdir(parents=True)
        path = run.path / name
        if name in ("metrics.jsonl", "trainer.log"):
            os.mkfifo(path)
        elif name == "model":
            path.symlink_to(settings.data_dir)
        elif name == "base":
            (run.path / "base_model.json").symlink_to("/etc/passwd")
        elif "." in name or name == "lock":
            path.mkdir()
        else:
            path.write_text("a file")
    supervisor = Supervisor(settings, database, Slots(on_cpu=True))
    supervisor._claim_for_free_devices()
    with database.reading() as session:
        job = transitions.get(session, job_id)
    assert (job.status, supervisor.running) == ("failed", [])
    assert "submit it again" in job.error["message"]


def test_a_damaged_fingerprint_of_the_base_model_is_an_explained_failure(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=4))
    (run.path / "base_model.json").write_bytes(b"\xff{")
    with pytest.raises(CannotTrain, match="changed since"):
        stage_base_model(run.assignment(), run)
