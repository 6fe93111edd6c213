"""Configurations of other tools: the effective batch is exact, and what a tool cannot do is said."""

import json
import re
from math import prod
from typing import Any, get_args

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app.planning import catalogue
from app.planning.tool_configs import Tool, config_for
from app.planning.tool_configs.job import NotExpressible, split_evenly
from app.settings import Settings
from tests.harness.tool_jobs import LLAMA, job, words_of

PATH = "/gradient-accumulation/tool-configs"


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 300))
def test_the_split_is_exact(batch: int, devices: int, most: int) -> None:
    if batch % devices:
        with pytest.raises(NotExpressible, match=f"multiple of {devices}"):
            split_evenly(batch, devices, most)
        return
    split = split_evenly(batch, devices, most)
    assert split.effective_batch == batch
    assert split.micro_batch <= most
    larger = range(split.micro_batch + 1, min(most, batch // devices) + 1)
    assert all(batch // devices % size for size in larger), "it is the largest that divides the batch"


def batch_in(tool: Tool, content: str) -> int:
    """The effective batch that a configuration means."""
    if tool == "torchtune":
        words = dict(each.split("=", 1) for each in words_of(content) if "=" in each)
        devices = re.search(r"--nproc_per_node (\d+)", content)
        return prod(
            (
                int(words["batch_size"]),
                int(words["gradient_accumulation_steps"]),
                int(devices[1]) if devices else 1,
            )
        )
    read = yaml.safe_load(content)
    if tool == "nemo":
        return int(read["step_scheduler"]["global_batch_size"])
    if tool == "kubeflow":
        trainer = read["spec"]["trainer"]
        arguments = dict(zip(trainer["args"][::2], trainer["args"][1::2], strict=True))
        names = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
        assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
        return int(trainer["numProcPerNode"]) * prod(int(arguments[name]) for name in names)
    size = read["micro_batch_size" if tool == "axolotl" else "per_device_train_batch_size"]
    devices = re.search(r"(?:num_processes|nproc-per-node|NPROC_PER_NODE)[ =](\d+)", content)
    return int(size) * int(read["gradient_accumulation_steps"]) * (int(devices[1]) if devices else 1)


@pytest.mark.parametrize("tool", get_args(Tool))
@pytest.mark.parametrize(("batch", "devices", "most"), [(60, 2, 7), (7, 1, 4), (64, 1, 64), (24, 8, 100)])
def test_each_tool_trains_the_same_batch(tool: Tool, batch: int, devices: int, most: int) -> None:
    content = config_for(tool, job(split=split_evenly(batch, devices, most))).content
    assert batch_in(tool, content) == batch
    assert f"{batch} samples per step" in content


@pytest.mark.parametrize(
    ("tool", "changes", "why"),
    [
        ("trl", {"objective": "simpo"}, "choose sft, dpo, kto or reward"),
        ("trl", {"optimizer": "lamb"}, "choose adamw"),
        ("axolotl", {"objective": "classification"}, "no classification"),
        ("llamafactory", {"objective": "classification"}, "no classification"),
        ("torchtune", {"model": "google/gemma-3-1b-it"}, "no configuration for google/gemma-3-1b-it"),
        ("torchtune", {"model": "google/gemma-2b", "method": "full", "split": split_evenly(8, 1, 8)},
         "full on a single device"),
        ("torchtune", {"precision": "fp16"}, "fp32 or in pure_bf16"),
        ("torchtune", {"objective": "dpo"}, "sft only"),
        ("nemo", {"method": "qlora"}, "choose lora"),
        ("nemo", {"objective": "kto"}, "sft only"),
        ("kubeflow", {"objective": "orpo"}, "choose sft"),
    ],
)  # fmt: skip
def test_what_a_tool_cannot_do_is_said(tool: Tool, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(NotExpressible, match=why):
        config_for(tool, job(**changes))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama2/7B_lora_single_device"),
        ("meta-llama/Meta-Llama-3-8B", "llama3/8B_lora_single_device"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3_2/1B_lora_single_device"),
        ("Qwen/Qwen2-0.5B", "qwen2/0.5B_lora_single_device"),
        ("Qwen/Qwen2.5-1.5B", "qwen2_5/1.5B_lora_single_device"),
        ("google/gemma-2b", "gemma/2B_lora_single_device"),
        ("google/gemma-2-2b-it", "gemma2/2B_lora_single_device"),
        ("mistralai/Mistral-7B-v0.3", "mistral/7B_lora_single_device"),
    ],
)
def test_torchtune_s_configuration_is_found_by_the_model_s_name(model: str, name: str) -> None:
    words = words_of(config_for("torchtune", job(model=model, split=split_evenly(8, 1, 8))).content)
    assert words[words.index("--config") + 1] == name


def test_the_micro_batch_fits_the_smallest_device(client: TestClient) -> None:
    asked = {
        "model_name": "gpt2", "gpus": ["16GB", "80GB"], "target_effective_batch_size": 256, "wait_seconds": 0,
    }  # fmt: skip
    planned = client.post("/gradient-accumulation/calculate-batch-size", json=asked).json()
    smallest, largest = (device["max_micro_batch_size"] for device in planned["devices"])
    assert smallest < planned["actual_batch_size_per_gpu"] <= largest
    written = client.post(f"{PATH}/trl", json=asked).json()
    assert written["micro_batch_size"] <= smallest
    assert written["effective_batch_size"] == 256


def test_over_http(client: TestClient) -> None:
    asked = {
        "model_name": LLAMA, "target_effective_batch_size": 60, "gpus": ["80GB", "80GB"], "method": "lora",
        "gradient_checkpointing": True, "max_length": 1024, "wait_seconds": 0,
    }  # fmt: skip
    planned = client.post("/gradient-accumulation/calculate-batch-size", json=asked).json()
    for tool in get_args(Tool):
        made = client.post(f"{PATH}/{tool}", json=asked)
        assert made.status_code == 200, made.text
        body = made.json()
        assert batch_in(tool, body["content"]) == body["effective_batch_size"] == 60
        assert body["micro_batch_size"] <= planned["actual_batch_size_per_gpu"]
        assert body["micro_batch_size"] * body["accumulation_steps"] * body["devices"] == 60
    written = yaml.safe_load(
        client.post(f"{PATH}/trl", json={**asked, "learning_rate": 1e-3}).json()["content"]
    )
    assert (written["learning_rate"], written["max_length"]) == (1e-3, 1024)


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"target_effective_batch_size": 61}, 422, "multiple of 2"),
        ({"target_effective_batch_size": None}, 422, "target_effective_batch_size is missing"),
        ({"gpus": ["1GB", "1GB"]}, 422, "No configuration is written"),
        ({"model_name": "ftjob-1"}, 422, "export the model"),
        ({"data": "a\nb"}, 422, "data"),
    ],
)
def test_what_cannot_be_written_is_said(
    client: TestClient, changes: dict[str, Any], status: int, why: str
) -> None:
    asked = {"model_name": LLAMA, "target_effective_batch_size": 60, "gpus": ["80GB", "80GB"],
             "method": "lora", "wait_seconds": 0, **changes}  # fmt: skip
    made = client.post(f"{PATH}/trl", json=asked)
    assert made.status_code == status, made.text
    assert why in made.text
    assert client.post(f"{PATH}/unsloth", json=asked).status_code == 422


def test_a_short_name_is_written_as_the_id_on_the_hub(client: TestClient, settings: Settings) -> None:
    body = {
        "model_name": "Llama-3.1-8b", "target_effective_batch_size": 8, "method": "lora", "gpus": ["80GB"],
        "wait_seconds": 0,
    }  # fmt: skip
    written = yaml.safe_load(client.post(f"{PATH}/trl", json=body).json()["content"])
    assert written["model_name_or_path"] == "meta-llama/Llama-3.1-8B"
    assert settings.models_dir is not None
    own = settings.models_dir / "Llama-3.1-8b"
    own.mkdir(parents=True)
    (own / "config.json").write_text(json.dumps({**catalogue.CATALOGUE["openai-community/gpt2"]}))
    written = yaml.safe_load(client.post(f"{PATH}/trl", json=body).json()["content"])
    assert written["model_name_or_path"] == "Llama-3.1-8b", "a folder of that name comes first"
