"""Classifiers and reward models from end to end: submitted, trained further, exported, and refused where a
language model is needed."""

import json
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue, running

pytestmark = pytest.mark.thorough

TEXTS = [
    {"text": word + " " * (number % 5), "label": label}
    for number in range(12)
    for word, label in (("good", "positive"), ("bad", "negative"))
]
PAIRS = [{"prompt": f"{each}", "chosen": " good", "rejected": " bad"} for each in range(24)]
PROMPTS = [{"prompt": f"{each}", "completion": " good"} for each in range(24)]


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    with running(tmp_path_factory.mktemp("scores")) as accrue:
        accrue.serve()
        accrue.start("worker")
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
        yield accrue


def submitted(accrue: Accrue, lines: list[Any], model: str, **training: Any) -> Any:
    file = accrue.upload("\n".join(map(json.dumps, lines)).encode())
    body = {
        "model_name": model,
        "dataset_config": {
            "file_id": file,
            "validation_split": 0.25,
            "max_length": 32,
        },
        "training_config": {"max_steps": 12, "learning_rate": 5e-3, "seed": 1, **training},
        "target_effective_batch_size": 8,
    }
    return accrue.http.post(f"{TRAINING}/with-accumulation", json=body)


def trained(accrue: Accrue, lines: list[Any], model: str = "accrue/tiny-gpt2", **training: Any) -> Any:
    """A job that has succeeded."""
    answer = submitted(accrue, lines, model, **training)
    assert answer.status_code == 202, answer.text
    ended = accrue.ended(answer.json()["id"])
    assert ended["status"] == "succeeded", ended["error"]
    return ended


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_a_classifier_is_trained_further_and_exported(accrue: Accrue, tmp_path: Path, method: str) -> None:
    first = trained(accrue, TEXTS, method=method)
    assert first["result"]["eval_token_accuracy"] == 1.0
    more = trained(accrue, TEXTS, model=first["id"], method=method)
    assert more["result"]["first_loss"] < 0.5 * first["result"]["first_loss"], "its head was kept"
    answer = accrue.http.post(f"{TRAINING}/{more['id']}/exports", json={"format": "merged"})
    assert answer.status_code == 202, answer.text
    where = f"{TRAINING}/{more['id']}/exports/{answer.json()['id']}"
    until(lambda: accrue.get(where)["status"] in ("succeeded", "failed"), 120)
    made = accrue.get(where)
    assert made["status"] == "succeeded", made["error"]
    assert made["verification"]["agreement"] == 1.0
    assert "text-classification" in made["commands"]["transformers"]
    with tarfile.open(fileobj=BytesIO(accrue.http.get(made["download"]).content)) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = {path.parent for path in tmp_path.rglob("config.json")}
    ask = pipeline("text-classification", model=str(folder))
    assert [each["label"] for each in ask(["good", "bad"])] == ["positive", "negative"]


def test_a_reward_model_begins_with_a_language_model(accrue: Accrue) -> None:
    """Also with adapters of one, which are trained further beside a new head."""
    for method in ("full", "lora"):
        taught = trained(accrue, PROMPTS, method=method)
        judge = trained(accrue, PAIRS, model=taught["id"], method=method, objective="reward")
        assert judge["result"]["eval_rewards"]["accuracy"] == 1.0
        assert judge["result"]["eval_rewards"]["chosen_log_prob"] is None
        assert judge["result"]["eval_token_accuracy"] is None


def test_what_needs_a_language_model_refuses_others(accrue: Accrue) -> None:
    classifier = trained(accrue, TEXTS)
    answer = submitted(accrue, PROMPTS, classifier["id"])
    assert answer.status_code == 422
    assert "predicts no tokens" in answer.text
    asked = {"model": classifier["id"], "messages": [{"role": "user", "content": "Hi"}]}
    answer = accrue.http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert "scores texts (negative, positive)" in answer.json()["error"]["message"]
    answer = accrue.http.post(f"{TRAINING}/{classifier['id']}/exports", json={"format": "gguf"})
    assert answer.status_code == 422
    assert "completes nothing" in accrue.command("completions", classifier["id"]).stdout
    other = [{**row, "label": f"{row['label']}!"} for row in TEXTS]
    answer = submitted(accrue, other, f"{classifier['id']}:ckpt-step-12")
    assert answer.status_code == 422
    assert "other scores" in answer.text
