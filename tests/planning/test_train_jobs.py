"""Recommendations for TrainJobs of Kubeflow Trainer: the patched job trains the same batch."""

from math import prod
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from app.planning.train_jobs import TrainJob, TrlJob

PATH = "/gradient-accumulation/recommend-train-job"
MODEL = "meta-llama/Llama-3.1-8B"
LORA = ["--use_peft", "--lora_r", "8"]


def train_job(*arguments: str, command: list[str] | None = None, **trainer: Any) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "tune", "uid": "4ac1", "resourceVersion": "17"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "command": command or ["torchrun", "-m", "trl.scripts.sft"],
                "args": ["--model_name_or_path", MODEL, *arguments],
                **trainer,
            },
        },
        "status": {"conditions": []},
    }


def patched(job: dict[str, Any], patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    return {**job, **{name: patched(job.get(name, {}), each) for name, each in patch.items()}}


def batch_of(job: dict[str, Any]) -> int:
    return TrlJob(TrainJob.model_validate(job)).effective_batch


@pytest.mark.parametrize(
    ("job", "batch"),
    [
        (train_job(*LORA), 8),
        (train_job(*LORA, "--per_device_train_batch_size", "64"), 64),
        (train_job(*LORA, "--per-device-train-batch-size=3", "--gradient_accumulation_steps=20"), 60),
        (train_job(*LORA, "--per_device_train_batch_size=64", numNodes=2, numProcPerNode=4), 512),
        (train_job(*LORA, numNodes=3, resourcesPerNode={"limits": {"nvidia.com/gpu": "2"}}), 48),
        (train_job(*LORA, resourcesPerNode={"requests": {"nvidia.com/gpu": 2, "cpu": "500m"}}), 16),
        (train_job(command=["trl", "dpo", *LORA, "--per_device_train_batch_size", "32"]), 32),
        (
            train_job(
                "--per_device_train_batch_size=6",
                command=["trl", "sft", *LORA, "--per_device_train_batch_size=9"],
            ),
            6,
        ),
        (train_job(*LORA, numProcPerNode=4, resourcesPerNode={"requests": {"nvidia.com/gpu": 2}}), 32),
    ],
)
def test_the_effective_batch_stays(client: TestClient, job: dict[str, Any], batch: int) -> None:
    response = client.post(PATH, json=job, params={"gpu": ["24GB", "80GB"]})
    assert response.status_code == 200, response.text
    found = response.json()
    after = patched(job, found["patch"])
    assert batch_of(job) == batch_of(after) == found["effective_batch_size"] == batch
    devices = found["nodes"] * found["gpus_per_node"]
    assert prod((found["micro_batch_size"], found["accumulation_steps"], devices)) == batch
    assert after["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == found["gpus_per_node"]
    requested = after["spec"]["trainer"]["resourcesPerNode"].get("requests", {})
    assert requested.get("nvidia.com/gpu", found["gpus_per_node"]) == found["gpus_per_node"]
    assert after["spec"]["runtimeRef"] == job["spec"]["runtimeRef"]
    again = client.post(PATH, json=after, params={"gpu": [found["gpu"]]}).json()
    assert patched(after, again["patch"]) == after, "a second recommendation changes nothing"


def test_the_first_kind_that_fits_is_recommended(client: TestClient) -> None:
    job = train_job(*LORA, "--per_device_train_batch_size", "64")
    found = client.post(PATH, json=job, params={"gpu": ["12GB", "40GB", "80GB"]}).json()
    assert found["gpu"] == "40GB"
    assert found["micro_batch_size"] < 64
    refused = client.post(PATH, json=job, params={"gpu": "8GB"})
    assert refused.status_code == 422
    assert "No resources are recommended" in refused.json()["error"]["message"]


def test_configurations_that_were_written_here_are_read(client: TestClient) -> None:
    asked = {"model_name": MODEL, "target_batch_size": 64, "gpus": ["80GB"] * 2, "method": "lora"}
    written = client.post("/gradient-accumulation/tool-configs/kubeflow", json=asked).json()
    job = yaml.safe_load(written["content"])
    found = client.post(PATH, json=job, params={"gpu": "80GB"}).json()
    assert found["micro_batch_size"] == written["micro_batch_size"]
    assert patched(job, found["patch"]) == job


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (train_job() | {"kind": "Job"}, "TrainJob"),
        (train_job("--per_device_train_batch_size", "many"), "'many'"),
        (train_job("--optim", "galore_adamw"), "galore_adamw"),
        (train_job(command=["torchrun", "-m", "trl.scripts.grpo"]), "grpo"),
        (train_job(resourcesPerNode={"limits": {"nvidia.com/gpu": "half"}}), "half"),
        (train_job(numNodes=1024, numProcPerNode=1024), "1024"),
        (train_job(*LORA, "--gradient_accumulation_steps", "999999"), "target_effective_batch_size"),
    ],
)
def test_what_cannot_be_read_is_said(client: TestClient, job: dict[str, Any], said: str) -> None:
    response = client.post(PATH, json=job, params={"gpu": "80GB"})
    assert response.status_code == 422
    assert said in response.text


def test_a_job_without_a_model_is_refused(client: TestClient) -> None:
    job = train_job()
    job["spec"]["trainer"]["args"] = ["--config", "trl.yaml"]
    response = client.post(PATH, json=job, params={"gpu": "80GB"})
    assert "--model_name_or_path" in response.json()["error"]["message"]


def test_a_warning_says_what_all_logits_take(client: TestClient) -> None:
    job = train_job(*LORA, "--per_device_train_batch_size=4", "--max_length=2048")
    found = client.post(PATH, json=job, params={"gpu": ["80GB"]}).json()
    size = 4 * found["micro_batch_size"] * 2048 * 128_256 / 2**30
    assert f"up to {size:.1f} GiB more" in found["warnings"][-1]
