import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.memory_profiles import profiles
from app.memory_profiles.profiles import ProfileKey
from app.settings import Settings

ROOT = "/gradient-accumulation"
LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": 301, "max_position_embeddings": 128,
}  # fmt: skip


def test_effective_batch_size(client: TestClient) -> None:
    path = f"{ROOT}/calculate-effective-batch-size?actual_batch_size=8&accumulation_steps=4"
    assert client.post(path).json()["effective_batch_size"] == 32
    assert client.post(f"{path}&num_gpus=3").json()["effective_batch_size"] == 96


@pytest.mark.parametrize(
    ("target", "micro", "gpus", "steps", "sizes"),
    [
        (32, 8, 1, 4, [8, 8, 8, 8]),
        (30, 8, 1, 4, [8, 8, 7, 7]),
        (64, 8, 2, 4, [8, 8, 8, 8]),
        (1, 8, 1, 1, [1]),
        (256, 40, 1, 7, [37, 37, 37, 37, 36, 36, 36]),
    ],
)
def test_accumulation_steps_meet_the_target_exactly(
    client: TestClient, target: int, micro: int, gpus: int, steps: int, sizes: list[int]
) -> None:
    query = f"target_batch_size={target}&actual_batch_size={micro}&num_gpus={gpus}"
    body = client.post(f"{ROOT}/calculate-accumulation-steps?{query}").json()
    assert (body["accumulation_steps"], body["effective_batch_size"], body["exact"]) == (steps, target, True)
    assert body["micro_batch_sizes"] == sizes


def test_learning_rates(client: TestClient) -> None:
    path = f"{ROOT}/adjust-learning-rate?base_lr=0.001&accumulation_steps=4"
    body = client.post(path).json()
    assert (body["adjusted_lr"], body["scale"], body["rule"]) == (0.002, 2.0, "sqrt")
    assert body["all"] == {"sqrt": 0.002, "linear": 0.004, "inverse": 0.00025, "none": 0.001}
    assert client.post(f"{path}&optimizer=sgd").json()["rule"] == "linear"
    assert "summed" in client.post(f"{path}&rule=inverse").json()["explanation"]


@pytest.mark.parametrize(
    "path",
    [
        "calculate-effective-batch-size?actual_batch_size=0&accumulation_steps=4",
        "calculate-effective-batch-size?actual_batch_size=8",
        "calculate-accumulation-steps?target_batch_size=-1&actual_batch_size=8",
        "calculate-accumulation-steps?target_batch_size=1000000&actual_batch_size=1",
        "adjust-learning-rate?base_lr=0&accumulation_steps=4",
        "adjust-learning-rate?base_lr=nan&accumulation_steps=4",
        "adjust-learning-rate?base_lr=0.1&accumulation_steps=4&rule=cubic",
    ],
)
def test_invalid_numbers_are_rejected(client: TestClient, path: str) -> None:
    answer = client.post(f"{ROOT}/{path}")
    assert answer.status_code == 422
    assert answer.json()["errors"]


def test_batch_size_by_model_on_declared_devices(client: TestClient) -> None:
    body = {"model_name": "gpt2", "target_effective_batch_size": 64, "gpu_ids": [0, 1, 2, 3]}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert (answer["fits"], answer["effective_batch_size"], answer["source"]) == (True, 64, "formula")
    assert answer["parameters"] == 124_439_808
    assert len(answer["devices"]) == 4
    assert sum(device["samples"] for device in answer["devices"]) == 64
    memory = answer["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    assert memory["peak_allocated_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    assert memory["peak_process_bytes"] <= answer["devices"][0]["memory_limit_bytes"]
    query = "model_name=gpt2&target_batch_size=64&gpu_ids=0&gpu_ids=1"
    two = client.get(f"{ROOT}/calculate-batch-size?{query}").json()
    assert [device["gpu_id"] for device in two["devices"]] == [0, 1]


def test_num_gpus_limits_the_devices_that_are_used(client: TestClient) -> None:
    def requested(**more: object) -> Any:
        return client.post(f"{ROOT}/calculate-batch-size", json={"model_name": "gpt2", **more}).json()

    assert [device["gpu_id"] for device in requested(num_gpus=2)["devices"]] == [0, 1]
    six = requested(num_gpus=6, target_effective_batch_size=48)
    assert sum(device["samples"] for device in six["devices"]) == 48
    assert "6 devices were requested, but only 4 found" in six["warnings"][0]
    assert "num_gpus is 3, but 2 are named" in requested(num_gpus=3, gpu_ids=[0, 1])["detail"]


def test_json_is_read_despite_a_form_content_type(client: TestClient) -> None:
    answer = client.post(
        f"{ROOT}/calculate-batch-size",
        content=b'{"model_name": "gpt2", "gpus": ["24GB"]}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert answer.status_code == 200, answer.text


def test_batch_size_from_raw_figures(client: TestClient) -> None:
    """Forty samples fit: a target of 256 takes 7 steps and stays 256, instead of becoming 6 × 40 = 240."""
    figures = {"model_size_gb": 1, "activation_memory_per_sample_mb": 1024, "available_memory_gb": 50}
    body = {
        **figures,
        "target_effective_batch_size": 256,
        "max_memory_usage": 0.9,
        "memory_safety_margin": 0.12,
    }
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert answer["max_micro_batch_size"] == 40
    assert (answer["accumulation_steps"], answer["effective_batch_size"]) == (7, 256)


def test_a_plan_that_does_not_fit_lists_alternatives_that_fit(client: TestClient) -> None:
    body = {"model_name": "gpt2-xl", "gpus": ["26GB"], "max_length": 64}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert answer["fits"] is False
    fitting = [other for other in answer["alternatives"] if other["fits"]]
    assert len(answer["alternatives"]) >= 4
    assert f"The smallest change that fits: {fitting[0]['change']}" in answer["explanation"]
    budget = answer["devices"][0]["memory_limit_bytes"]
    assert all((other["peak_process_bytes"] <= budget) is other["fits"] for other in answer["alternatives"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model_name": "gpt2", "gpu_ids": [7]}, "gpu_ids"),
        ({"model_name": "gpt2", "gpu_ids": [0, 0]}, "body"),
        ({"model_name": "gpt2", "gpus": ["toaster"]}, "gpus"),
        ({"model_name": "gpt2", "max_length": 4096}, "max_length"),
        ({"model_name": "no-such-model"}, "model_name"),
        ({}, "body"),
        ({"model_name": "gpt2", "model_size_gb": 1}, "body"),
    ],
)
def test_unanswerable_requests_get_422(client: TestClient, body: dict[str, Any], field: str) -> None:
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("more", "samples"),
    [({}, 1000), ({"target_effective_batch_size": 16}, 16), ({"gpus": ["24GB", "24GB"]}, 1000)],
    ids=str,
)
def test_the_memory_of_a_given_micro_batch_is_answered(
    client: TestClient, more: dict[str, Any], samples: int
) -> None:
    body = {"model_name": "gpt2", "micro_batch_size": 1000, "gpus": ["24GB"], "wait_seconds": 0, **more}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert (answer["actual_batch_size_per_gpu"], answer["accumulation_steps"]) == (samples, 1)
    assert answer["fits"] is (samples == 16)


FULL_8B = {
    "model_name": "llama-3.1-8b", "gradient_checkpointing": True, "max_length": 1024, "wait_seconds": 0,
    "target_effective_batch_size": 64,
}  # fmt: skip


def test_a_model_of_which_no_copy_fits_is_sharded_as_for_a_job(client: TestClient) -> None:
    path, four = f"{ROOT}/calculate-batch-size", ["80GB"] * 4
    alone = client.post(path, json={**FULL_8B, "gpus": four[:1]}).json()
    assert (alone["fits"], alone["strategy"], alone["zero_stage"]) == (False, "ddp", None)
    assert any(other["change"] == "num_gpus: 2" for other in alone["alternatives"])
    together = client.post(path, json={**FULL_8B, "gpus": four}).json()
    assert (together["fits"], together["strategy"], together["zero_stage"]) == (True, "fsdp", 3)
    assert "sharded across them (fsdp, ZeRO stage 3)" in together["explanation"]
    whole = client.post(path, json={**FULL_8B, "gpus": four, "optimizer": "adafactor"}).json()
    assert whole["strategy"] == "ddp", "it needs whole parameters"
    body = {**FULL_8B, "gpus": four}
    answer = client.post(f"{ROOT}/tool-configs/trl", json=body)
    assert answer.status_code == 422, "a configuration for TRL gives each device a full copy"


def test_a_model_that_does_not_fit_even_if_sharded(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has the memory of a part, which is simulated, too, for the change that would fit."""
    simulated = []

    async def simulate(database: object, wanted: ProfileKey, *_: object) -> list[str]:
        simulated.append(wanted.recipe)
        return []

    monkeypatch.setattr(profiles, "wait_for", simulate)
    body = {**FULL_8B, "gpus": ["24GB"] * 4, "gradient_checkpointing": False, "wait_seconds": 1}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert (answer["fits"], answer["strategy"], answer["zero_stage"]) == (False, "fsdp", 3)
    assert (
        "it does not fit, even if weights, gradients and the optimizer's states are sharded across the 4 "
        "devices (fsdp, ZeRO stage 3)" in answer["explanation"]
    )
    least = answer["alternatives"][0]
    assert (least["fits"], least["zero_stage"], least["source"]) == (True, 3, "formula")
    assert [(each.parts, each.zero_stage) for each in simulated[1:]] == [(4, 3)] * (len(simulated) - 1)
    assert len(simulated) > 2


def test_too_large_a_micro_batch_is_no_reason_to_shard(client: TestClient) -> None:
    body = {"model_name": "gpt2", "micro_batch_size": 1000, "gpus": ["24GB"] * 2, "wait_seconds": 0}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert (answer["fits"], answer["strategy"]) == (False, "ddp")
    assert "sharded" not in answer["explanation"]
    assert not any(other["zero_stage"] for other in answer["alternatives"] if not other["fits"])


@pytest.mark.parametrize("micro_batch", [None, 8, 64])
def test_a_remedy_fits_when_it_is_applied(client: TestClient, micro_batch: int | None) -> None:
    path = f"{ROOT}/calculate-batch-size"
    body = {**FULL_8B, "gpus": ["24GB"], "micro_batch_size": micro_batch, "method": "lora"}
    others = client.post(path, json=body).json()["alternatives"]
    applied = 0
    for other in others:
        name, _, value = other["change"].partition(": ")
        if not other["fits"] or "," in other["change"] or name not in ("micro_batch_size", "max_length"):
            continue
        answer = client.post(path, json={**body, name: int(value)}).json()
        assert answer["fits"], other["change"]
        assert answer["memory"]["peak_process_bytes"] == other["peak_process_bytes"], other["change"]
        applied += 1
    assert applied


def test_more_steps_than_a_job_may_have_are_refused(client: TestClient) -> None:
    body = {"model_name": "gpt2", "gpus": ["24GB"], "target_batch_size": 1_000_000, "micro_batch_size": 1}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body)
    assert answer.status_code == 422
    assert "more than 4096" in answer.json()["detail"]


@pytest.mark.parametrize(
    "changed",
    [{"method": "lora"}, {"gradient_checkpointing": True}, {"mixed_precision": "bf16"}, {"objective": "dpo"}],
)
def test_raw_figures_take_no_fields_that_would_be_ignored(
    client: TestClient, changed: dict[str, Any]
) -> None:
    figures = {"model_size_gb": 4, "activation_memory_per_sample_mb": 100, "available_memory_gb": 40}
    assert client.post(f"{ROOT}/calculate-batch-size", json=figures).status_code == 200
    answer = client.post(f"{ROOT}/calculate-batch-size", json={**figures, **changed})
    assert answer.status_code == 422
    assert f"{next(iter(changed))} needs model_name" in answer.json()["detail"]


def test_a_quantized_checkpoint_is_refused_at_once(client: TestClient, settings: Settings) -> None:
    assert settings.models_dir is not None
    folder = settings.models_dir / "awq"
    folder.mkdir(parents=True)
    config = {**LLAMA_CONFIG, "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    answer = client.post(f"{ROOT}/calculate-batch-size", json={"model_name": "awq", "gpus": ["24GB"]})
    assert answer.status_code == 422
    assert "quantized already" in answer.json()["detail"]


def test_a_local_config_is_enough_to_plan(client: TestClient, settings: Settings) -> None:
    assert settings.models_dir is not None
    folder = settings.models_dir / "my-llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    answer = client.post(f"{ROOT}/calculate-batch-size", json={"model_name": "my-llama", "gpus": ["24GB"]})
    assert answer.json()["parameters"] == 180_288
    (folder / "config.json").write_text('{"model_type": "mystery"}')
    answer = client.post(f"{ROOT}/calculate-batch-size", json={"model_name": "my-llama", "gpus": ["24GB"]})
    assert "model_type 'mystery'" in answer.json()["detail"]


def test_a_remedy_takes_no_more_steps_than_a_job_may_have(client: TestClient) -> None:
    body = {
        "model_name": "gpt2", "gpus": ["10GB"], "target_batch_size": 100_000, "micro_batch_size": 64,
        "wait_seconds": 0,
    }  # fmt: skip
    found = client.post(f"{ROOT}/calculate-batch-size", json=body).json()
    assert not found["fits"]
    steps = {other["change"]: other["accumulation_steps"] for other in found["alternatives"] if other["fits"]}
    assert steps
    assert max(steps.values()) <= 4096
