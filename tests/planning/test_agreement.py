"""The calculator, a submission and the worker answer the same question with the same plan."""

import json
import random
from collections import Counter
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient

from app.contract.objective import OtherObjectiveName
from app.contract.spec import OptimizerName, Spec
from app.jobs import transitions
from app.planning.devices import GIB, Device
from app.settings import Settings
from app.storage.database import Database
from workers.trainer_launcher import TrainerLauncher

GPU = Device(0, "24GB", 24 * GIB, "cuda")
"""The first of those that `client` declares."""

NATIVE = "/gradient-accumulation"


def drawn(source: random.Random) -> dict[str, Any]:
    """A question as the calculator takes it."""
    optimizer = source.choice(get_args(OptimizerName))
    return {
        "model_name": "accrue/tiny-gpt2",
        "target_effective_batch_size": round(2 ** source.uniform(0, 14)),
        "max_length": round(2 ** source.uniform(1, 10)),
        "method": source.choice(["full", {"lora": {"r": source.choice([4, 64])}}, "qlora"]),
        "optimizer": optimizer,
        "mixed_precision": source.choice([True, False, "bf16", "fp16", "pure_bf16"]),
        "gradient_checkpointing": source.random() < 0.3,
        "max_memory_usage": 2 ** source.uniform(-5.4, 0),
        "memory_safety_margin": source.choice([None, 0.02, 0.3]),
        "objective": source.choice(["sft", "sft", *get_args(OtherObjectiveName)]),
    }


def as_submission(question: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """The same as a request for a job, with the file of the objective."""
    training = ("method", "optimizer", "gradient_checkpointing", "objective")
    return {
        **{name: value for name, value in question.items() if name not in ("max_length", *training)},
        "training_config": {name: question[name] for name in training},
        "dataset_config": {"file_id": files[question["objective"]], "max_length": question["max_length"]},
        "auto_start": False,
    }


def uploaded(client: TestClient) -> dict[str, str]:
    """For each objective, the id of a file that it can learn from."""
    pair = {"prompt": "Say", "chosen": " yes", "rejected": " no"}
    classified = [{"text": "a text", "label": label} for label in (0, 1)]
    lines: dict[str, list[dict[str, Any]]] = {
        "sft": [{"text": "a text"}],
        "kto": [{"prompt": "Say", "completion": " yes", "label": True}],
        "classification": classified,
        **{name: [pair] for name in ("dpo", "orpo", "simpo", "reward")},
    }
    found = {}
    for name, rows in lines.items():
        whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = ("data.jsonl", whole * (50 // len(rows)))
        answer = client.post("/v1/files", files={"file": file}, data={"purpose": "fine-tune"})
        found[name] = str(answer.json()["id"])
    return found


@pytest.mark.parametrize("questions", [20, pytest.param(200, marks=pytest.mark.thorough)])
def test_calculator_dry_run_and_job_give_the_same_plan(
    client: TestClient, settings: Settings, database: Database, questions: int
) -> None:
    source, launcher = random.Random(17), TrainerLauncher(settings, database)
    steps: Counter[bool] = Counter()
    files = uploaded(client)
    for number in range(questions):
        question = drawn(source)
        calculated = client.post(
            f"{NATIVE}/calculate-batch-size", json={**question, "num_gpus": 1, "wait_seconds": 0}
        )
        assert calculated.status_code == 200, calculated.text
        dry = client.post(
            f"{NATIVE}/training/with-accumulation", json={**as_submission(question, files), "dry_run": True}
        )
        assert dry.status_code == 200, dry.text
        submitted = client.post(f"{NATIVE}/training/with-accumulation", json=as_submission(question, files))
        assert submitted.status_code == 202, submitted.text
        with database.reading() as session:
            spec = Spec.model_validate(transitions.get(session, submitted.json()["training_id"]).spec)
        on_worker = launcher._new_plan(spec, (GPU,))
        answer = calculated.json()
        device = answer["devices"][0]
        expected = {
            "effective_batch_size": answer["effective_batch_size"],
            "accumulation_steps": answer["accumulation_steps"],
            "actual_batch_size_per_gpu": answer["actual_batch_size_per_gpu"],
            "predicted_peak_bytes": answer["memory"]["peak_process_bytes"],
            "memory_limit_bytes": device["memory_limit_bytes"],
        }
        for plan in (dry.json()["plan"], submitted.json()["plan"], on_worker.model_dump(mode="json")):
            own = {**plan["ranks"][0], **plan}
            assert {name: own[name] for name in expected} == expected, f"question {number}: {question}"
        steps[answer["accumulation_steps"] > 1] += 1
    assert min(steps[True], steps[False]) > questions // 10  # with accumulation and without
