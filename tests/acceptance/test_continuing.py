"""Training that continues from what earlier jobs left: models, adapters and checkpoints."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.harness.service import TRAINING, Accrue, running

pytestmark = pytest.mark.thorough

DATA = {"texts": [f"sample number {number} is here" for number in range(64)], "max_length": 32}
UNCHANGED = {"max_steps": 1, "learning_rate": 1e-12}
"""A job that leaves the weights as they were, to rounding."""


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    with running(tmp_path_factory.mktemp("continuing")) as accrue:
        accrue.serve()
        accrue.start("worker")
        yield accrue


def trained(accrue: Accrue, model: str = "accrue/tiny-gpt2", **training: Any) -> Any:
    job_id = accrue.submit(
        model_name=model, dataset_config=DATA, training_config=training, target_effective_batch_size=8
    )
    job = accrue.ended(job_id)
    assert job["status"] == "succeeded", job["error"]
    return job


def name_of(accrue: Accrue, job: Any) -> str:
    return str(accrue.get(f"/v1/fine_tuning/jobs/{job['id']}")["fine_tuned_model"])


def loaded(accrue: Accrue, job: Any) -> dict[str, torch.Tensor]:
    """The weights of a job's whole model."""
    return dict(AutoModelForCausalLM.from_pretrained(accrue.run(job["id"]).model).state_dict())


def adapters(accrue: Accrue, job: Any) -> dict[str, torch.Tensor]:
    return load_file(accrue.run(job["id"]).model / "adapter_model.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


def checkpoints(accrue: Accrue, job: Any) -> list[str]:
    listed = accrue.get(f"/v1/fine_tuning/jobs/{job['id']}/checkpoints")["data"]
    return [each["fine_tuned_model_checkpoint"] for each in listed]


def below(accrue: Accrue, job: Any) -> str:
    config = json.loads((accrue.run(job["id"]).model / "adapter_config.json").read_text())
    return str(config["base_model_name_or_path"])


@pytest.fixture(scope="module")
def whole(accrue: Accrue) -> Any:
    return trained(accrue, max_steps=10, learning_rate=1e-3, save_every=4)


@pytest.fixture(scope="module")
def adapted(accrue: Accrue, whole: Any) -> Any:
    return trained(accrue, name_of(accrue, whole), max_steps=6, save_every=2, method="lora")


def test_a_model_is_trained_further_by_its_name_and_by_its_job_s_id(accrue: Accrue, whole: Any) -> None:
    for model in (name_of(accrue, whole), whole["id"]):
        again = trained(accrue, model, **UNCHANGED)
        assert again["model_name"] == name_of(accrue, whole)
        assert_same(loaded(accrue, again), loaded(accrue, whole))
    assert name_of(accrue, again).startswith("ft:accrue/tiny-gpt2:accrue::")


def test_adapters_are_trained_further_by_default(accrue: Accrue, whole: Any, adapted: Any) -> None:
    assert below(accrue, adapted) == name_of(accrue, whole)
    again = trained(accrue, name_of(accrue, adapted), **UNCHANGED)
    assert again["training_config"]["method"] == "lora"
    assert_same(adapters(accrue, again), adapters(accrue, adapted))
    assert below(accrue, again) == name_of(accrue, whole)


def test_adapters_are_merged_by_a_full_fine_tuning(accrue: Accrue, whole: Any, adapted: Any) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(accrue.run(whole["id"]).model)
    merged = PeftModel.from_pretrained(base, accrue.run(adapted["id"]).model).merge_and_unload()
    again = trained(accrue, adapted["id"], method="full", **UNCHANGED)
    assert_same(loaded(accrue, again), dict(merged.state_dict()))
    together = trained(accrue, adapted["id"], method={"lora": {"merge": True}}, **UNCHANGED)
    assert_same(loaded(accrue, together), dict(merged.state_dict()))


@pytest.mark.parametrize("of", ["whole", "adapted"])
def test_a_checkpoint_is_a_model(accrue: Accrue, request: pytest.FixtureRequest, of: str) -> None:
    job = request.getfixturevalue(of)
    for model in checkpoints(accrue, job):
        again = trained(accrue, model, **UNCHANGED)
        assert again["model_name"] == model
        step = int(model.rpartition("-")[2])
        [folder] = accrue.run(job["id"]).checkpoints.glob(f"step-{step:08d}-*")
        kept = load_file(folder / "model.safetensors")
        found = loaded(accrue, again) if of == "whole" else adapters(accrue, again)
        named = {name.replace(".default", ""): weight for name, weight in kept.items()}
        assert_same({name: found[name] for name in named}, named)


def test_adapters_on_a_checkpoint_refer_to_it(accrue: Accrue, whole: Any) -> None:
    checkpoint = checkpoints(accrue, whole)[-1]
    first = trained(accrue, checkpoint, max_steps=2, method="lora")
    assert below(accrue, first) == checkpoint
    again = trained(accrue, first["id"], **UNCHANGED)
    assert below(accrue, again) == checkpoint
    assert_same(adapters(accrue, again), adapters(accrue, first))


def test_the_checkpoint_of_a_cancelled_job_is_kept(accrue: Accrue) -> None:
    training = {"max_steps": 100_000, "save_every": 5}
    job_id = accrue.submit(dataset_config=DATA, training_config=training, target_effective_batch_size=8)
    while accrue.steps_logged(job_id) < 12:
        pass
    refused = accrue.http.post(
        f"{TRAINING}/with-accumulation", json={"model_name": job_id, "dataset_config": DATA}
    )
    assert "has not ended yet" in refused.json()["detail"]
    accrue.post(f"{TRAINING}/{job_id}/cancel")
    job = accrue.ended(job_id)
    assert job["status"] == "cancelled"
    refused = accrue.http.post(
        f"{TRAINING}/with-accumulation", json={"model_name": job_id, "dataset_config": DATA}
    )
    assert refused.status_code == 422
    assert f"{job_id}:ckpt-step-" in refused.json()["detail"]
    model = checkpoints(accrue, job)[0]
    again = trained(accrue, f"{job_id}:ckpt-step-{model.rpartition('-')[2]}", **UNCHANGED)
    assert again["model_name"] == model


def test_openai_s_client_and_the_command_continue_too(accrue: Accrue, tmp_path: Path, whole: Any) -> None:
    data = tmp_path / "data.csv"
    data.write_text("question,answer\n" + "".join(f"{n} + 1,{n + 1}\n" for n in range(20)))
    with openai.OpenAI(api_key="unused", base_url=f"{accrue.url}/v1") as client:
        first = client.fine_tuning.jobs.retrieve(whole["id"])
        assert first.fine_tuned_model is not None
        file = client.files.create(
            file=data,
            purpose="fine-tune",
            extra_body={"columns": {"prompt": "question", "completion": "answer"}},
        )
        job = client.fine_tuning.jobs.create(
            model=first.fine_tuned_model, training_file=file.id, hyperparameters={"n_epochs": 1}
        )
        assert accrue.ended(job.id)["status"] == "succeeded"
        ended = client.fine_tuning.jobs.retrieve(job.id)
        assert ended.model == first.fine_tuned_model
    columns = ["--column", "prompt=question", "--column", "completion=answer"]
    submitted = accrue.command(
        "submit", str(data), *columns, "--model", str(ended.fine_tuned_model), "--epochs", "1", "--watch"
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "succeeded" in submitted.stdout


def test_what_cannot_be_continued_is_explained(accrue: Accrue, whole: Any, adapted: Any) -> None:
    def refused(model: str, **training: Any) -> str:
        job = {"model_name": model, "dataset_config": DATA, "training_config": training}
        answer = accrue.http.post(f"{TRAINING}/with-accumulation", json={**job, "dry_run": True})
        assert answer.status_code == 422, answer.text
        return str(answer.json()["detail"])

    assert "None of your jobs made the model ftjob-nope" in refused("ftjob-nope")
    assert "None of your jobs" in refused(name_of(accrue, whole).replace("tiny", "huge"))
    assert "Steps of its checkpoints: 10, 8" in refused(f"{whole['id']}:ckpt-step-77")
    assert "has adapters with r 16" in refused(adapted["id"], method={"lora": {"r": 4}})
    assert "choose lora" in refused(checkpoints(accrue, whole)[0], method="qlora").lower()
    assert "model_name" in refused("ft:no such name")


def test_a_model_deleted_before_the_job_starts_fails_it_with_the_reason(accrue: Accrue, whole: Any) -> None:
    for model, of in (("", ""), ("lora", "adapters")):
        source = trained(accrue, max_steps=1, **({"method": model} if model else {}))
        job = {"model_name": source["id"], "dataset_config": DATA, "training_config": UNCHANGED}
        job_id = accrue.submit(**job, auto_start=False)
        for path in (f"{TRAINING}/{source['id']}", f"/v1/models/{name_of(accrue, source)}"):
            refused = accrue.http.delete(path)
            assert refused.status_code == 409, path
            assert job_id in refused.json()["detail"]
        shutil.rmtree(accrue.run(source["id"]).path)
        accrue.post(f"{TRAINING}/{job_id}/start")
        ended = accrue.ended(job_id)
        assert (ended["status"], ended["error"]["code"]) == ("failed", "model_changed"), of
