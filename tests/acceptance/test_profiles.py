"""A worker with its profiler: simulated predictions over HTTP, and the plans of jobs based on them."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough

CALCULATE = "/gradient-accumulation/calculate-batch-size"
PROFILES = "/gradient-accumulation/profiles"


@pytest.mark.timeout(900)
def test_the_profiler_serves_profile_and_preview_requests(accrue: Accrue, tmp_path: Path) -> None:
    accrue.serve()
    requested = tmp_path / "asked.jsonl"
    requested.write_text('{"prompt": "Whose wörk?", "completion": " Mine."}\n' * 5)
    assert "No worker is running" in run(accrue, "preview", str(requested), status=1)
    llama = {"model_name": "meta-llama/Llama-3.1-8B", "gpus": ["24GB"], "wait_seconds": 30}
    by_formula = accrue.post(CALCULATE, llama)
    assert by_formula["source"] == "formula"
    assert "no worker" in by_formula["warnings"][0]

    worker = accrue.start("worker", ACCRUE_PROFILER="true")
    until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
    full = simulated(accrue, llama)
    assert full["fits"] is False
    assert len(full["alternatives"]) >= 4
    assert "The smallest change that fits" in full["explanation"]
    taken = simulated(accrue, {**llama, **advised(full)})
    assert taken["fits"] is True
    assert f"({taken['memory']['peak_process_bytes'] / 2**30:.2f} GiB)" in full["explanation"]
    adapters = {"method": "lora", "gradient_checkpointing": True, "mixed_precision": "bf16"}
    lora = simulated(accrue, {**llama, **adapters})
    assert lora["fits"] is True
    assert lora["memory"]["weights_bytes"] > 15 * 2**30

    (first, *_) = accrue.get(PROFILES)["data"]
    assert first["recipe"]["gradient_checkpointing"] is True
    assert accrue.http.delete(f"{PROFILES}/{first['id']}").status_code == 204
    assert accrue.http.get(f"{PROFILES}/{first['id']}").status_code == 404

    dry = {"dataset_config": {"texts": ["some text"] * 40, "max_length": 64}, "dry_run": True}
    body = {"model_name": "accrue/tiny-gpt2", **dry}
    accrue.post(f"{TRAINING}/with-accumulation", body)
    until(lambda: accrue.post(f"{TRAINING}/with-accumulation", body)["plan"]["source"] == "simulated", 90)
    job = accrue.submit(dataset_config=dry["dataset_config"], training_config={"max_steps": 4})
    assert accrue.ended(job)["status"] == "succeeded"
    again = accrue.post(f"{TRAINING}/with-accumulation", {**body, "gpu_ids": None})
    assert again["plan"]["source"] == "measured"  # by that job, on the worker's device, which jobs are for
    plan_for_short_samples(accrue, requested)
    look_at(accrue, requested)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0


def plan_for_short_samples(accrue: Accrue, path: Path) -> None:
    """A dry run measures the samples of a file, and plans for their lengths."""
    upload = {"files": {"file": (path.name, path.read_bytes())}, "data": {"purpose": "fine-tune"}}
    file_id = accrue.http.post("/v1/files", **upload).json()["id"]
    body = {
        "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file_id, "max_length": 512},
        "target_effective_batch_size": 64, "dry_run": True,
    }  # fmt: skip

    def plan() -> dict[str, Any]:
        found: dict[str, Any] = accrue.post(f"{TRAINING}/with-accumulation", body)["plan"]
        return found

    until(lambda: plan()["sample_length"] == 64, 90)
    assert plan()["accumulation_steps"] == 4
    accrue.http.delete(f"/v1/files/{file_id}")


def simulated(accrue: Accrue, body: dict[str, Any]) -> dict[str, Any]:
    """The answer once it is simulated, as is the smallest change that fits: a busy machine simulates for
    longer than a request waits. Every request waits as long as it says."""
    answer: dict[str, Any] = {}

    def is_simulated() -> bool:
        began = time.monotonic()
        answer.update(accrue.post(CALCULATE, body))
        waited = time.monotonic() - began
        assert answer["source"] == "simulated" or waited >= body["wait_seconds"]
        fitting = [other for other in answer["alternatives"] if other["fits"]][:1]
        return all(each["source"] == "simulated" for each in [answer, *fitting])

    until(is_simulated, 120)
    return answer


def advised(answer: dict[str, Any]) -> dict[str, Any]:
    """The smallest change that fits, as fields of a request."""
    least = next(other for other in answer["alternatives"] if other["fits"])
    assert least["source"] == "simulated"
    changes: dict[str, Any] = dict(each.split(": ") for each in least["change"].split(", "))
    changes = {
        name: value == "true" if value in ("true", "false") else value for name, value in changes.items()
    }
    return changes | {"micro_batch_size": least["micro_batch_size"]}


def run(accrue: Accrue, *words: str, status: int = 0) -> str:
    """What a command says, where it ends as it should."""
    done = accrue.command(*words)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def look_at(accrue: Accrue, requested: Path) -> None:
    """`accrue preview`, on files of one's own and on uploaded ones."""
    files = run(accrue, "files", "--json")
    seen = json.loads(run(accrue, "preview", str(requested), "--limit", "2", "--json"))
    assert [sample["line"] for sample in seen["samples"]] == [1, 2]
    (sample, _) = seen["samples"]
    counted = zip(sample["tokens"], sample["counts"], strict=True)
    assert "".join(text for text, counts in counted if counts) == " Mine.<|endoftext|>"
    assert run(accrue, "files", "--json") == files  # nothing of it stays
    told = run(accrue, "preview", str(requested), "--max-length", "8")
    assert "Whose w" in told
    assert "5 samples have no token within max_length that counts" in told
    assert "there is no file nowhere.jsonl" in run(accrue, "preview", "nowhere.jsonl", status=2)
    stays = run(accrue, "files", "add", str(requested)).strip()
    assert "Whose wörk? Mine." in run(accrue, "preview", stays)
    assert "Put its folder" in run(accrue, "preview", stays, "--model", "nobody/nothing", status=1)
