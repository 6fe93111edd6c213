"""`make bench-durations`: predicted and true durations of jobs whose models no job has trained before.

Trains a few models, then predicts and trains ten others on other data: before the job, and by its own
estimate of the time left after 20 steps. Writes results/durations.md.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.service import ENDED, TRAINING, Accrue, running
from workers.training.models.tiny_gpt2 import make_tokenizer

RESULTS = Path(__file__).parent / "results"
_STEPS_BEFORE_SECOND = 20

CALIBRATION = (("llama", 2, 128, 64, 8), ("gpt2", 6, 256, 48, 16), ("qwen3", 3, 192, 96, 8))
OTHERS = (
    ("llama", 4, 192, 80, 8), ("llama", 8, 128, 40, 16), ("gpt2", 3, 320, 64, 8), ("qwen3", 5, 256, 48, 12),
    ("mistral", 4, 256, 64, 8), ("olmo2", 6, 160, 100, 8), ("phi", 3, 256, 60, 16), ("gemma", 4, 192, 48, 8),
    ("smollm3", 6, 192, 72, 8), ("granite", 2, 384, 64, 8),
)  # fmt: skip
"""Family, layers, width, mean characters of a sample, effective batch."""


def make(models: Path, family: str, layers: int, width: int) -> str:
    """Makes a model, and returns its name."""
    name = f"{family}-{layers}-{width}"
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": width // 4, "vocab_size": 512,
        "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257,
    }  # fmt: skip
    if family == "gpt2":
        sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": 512, "vocab_size": 512,
                 "bos_token_id": 256, "eos_token_id": 256}  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(models / name)
    make_tokenizer().save_pretrained(models / name)
    return name


def data(accrue: Accrue, characters: int, samples: int, seed: int) -> str:
    """Uploads samples of different lengths."""
    draw = random.Random(seed)
    texts = [
        "".join(draw.choices("abcdefghij ", k=draw.randint(characters // 2, characters * 3 // 2)))
        for _ in range(samples)
    ]
    return accrue.upload("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def job(accrue: Accrue, model: str, file_id: str, batch: int, steps: int) -> dict[str, Any]:
    return {
        "model_name": model,
        "dataset_config": {"file_id": file_id, "max_length": 256},
        "training_config": {"max_steps": steps},
        "target_effective_batch_size": batch,
    }


def train(accrue: Accrue, body: dict[str, Any]) -> tuple[Any, float | None]:
    """The job once it has ended, and its duration as it was expected after 20 steps."""
    job_id = accrue.post(f"{TRAINING}/with-accumulation", body)["id"]
    second = None
    while True:
        found = accrue.job(job_id)
        progress = found["progress"]
        if second is None and progress["step"] >= _STEPS_BEFORE_SECOND and progress["eta_seconds"]:
            second = time.time() - found["started_at"] + progress["eta_seconds"]
        if found["status"] in ENDED:
            assert found["status"] == "succeeded", found["error"]
            return found, second
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    rows = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as accrue:
        models = Path(folder) / "models"
        accrue.serve()
        accrue.start("worker")
        for number, (family, layers, width, characters, batch) in enumerate(CALIBRATION):
            file_id = data(accrue, characters, 500, number)
            train(accrue, job(accrue, make(models, family, layers, width), file_id, batch, steps // 2))
        for number, (family, layers, width, characters, batch) in enumerate(OTHERS):
            file_id = data(accrue, characters, 700, 100 + number)
            body = job(accrue, make(models, family, layers, width), file_id, batch, steps)
            before = accrue.post(f"{TRAINING}/with-accumulation", {**body, "dry_run": True})
            ended, second = train(accrue, body)
            true = ended["finished_at"] - ended["started_at"]
            expected, (low, high) = (
                before["predicted_duration_seconds"], before["predicted_duration_range"],
            )  # fmt: skip
            rows.append((body["model_name"], true, expected, low, high, second))
            after = f"{second / true - 1:+.0%}" if second else "-"
            print(
                f"{body['model_name']:16} {true:6.1f} s, before {expected:6.1f} ({low:.1f} to {high:.1f}) "
                f"{expected / true - 1:+.0%}, after {_STEPS_BEFORE_SECOND} steps {after}",
                flush=True,
            )
    write(rows)


def write(rows: list[Any]) -> None:
    within = sum(abs(expected / true - 1) <= 0.25 for _, true, expected, *_ in rows)
    inside = sum(low <= true <= high for _, true, _, low, high, _ in rows)
    after = sum(second is not None and abs(second / true - 1) <= 0.1 for _, true, *_, second in rows)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, CPU, {platform.machine()}, torch {torch.__version__}; `make "
        f"bench-durations`. Of {len(rows)} jobs, {within} took within 25 % of what was predicted before, "
        f"{inside} a time in the predicted range, and {after} within 10 % of what was expected after "
        f"{_STEPS_BEFORE_SECOND} steps."
    )
    lines = [
        "| model | seconds | before | range | error | after 20 steps | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {true:.1f} | {expected:.1f} | {low:.1f} to {high:.1f} | {expected / true - 1:+.0%}"
            + (f" | {second:.1f} | {second / true - 1:+.0%} |" if second else " | - | - |")
            for name, true, expected, low, high, second in rows
        ),
    ]
    print(about)
    (RESULTS / "durations.md").write_text("# Durations\n\n" + about + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
