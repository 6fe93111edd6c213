"""Kills the processes of jobs, and compares how the jobs ended."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.harness.runs import until, write_texts
from tests.harness.service import TRAINING, Accrue

STEPS = 60


def submit(accrue: Accrue, *, devices: int | None = None, **training: Any) -> str:
    """A job of many small steps over several epochs, so that a kill falls anywhere."""
    path = accrue.data.parent / "texts.jsonl"
    if not path.exists():
        write_texts(path, count=150)
    return accrue.submit(
        dataset_config={"file_id": accrue.upload(path.read_bytes()), "max_length": 64},
        training_config={"max_steps": STEPS, "learning_rate": 1e-3, "save_every": 7, **training},
        target_effective_batch_size=64,
        micro_batch_size=4,
        **({} if devices is None else {"num_gpus": devices}),
    )


def end_of(accrue: Accrue, job_id: str) -> dict[str, Any]:
    """The results that must be bit-exact: weights, optimizer state and log."""
    run = accrue.run(job_id)
    newest = max(path for path in run.checkpoints.iterdir() if path.name.startswith("step-"))
    text = accrue.http.get(f"{TRAINING}/{job_id}/log").text
    return {
        "weights": digest(run.model / "model.safetensors"),
        "moments": digest(newest / "optimizer.safetensors"),
        "log": [[json.loads(line)[name] for name in LOGGED] for line in text.splitlines()],
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_trainer_at(accrue: Accrue, job_id: str, step: int, number: int = signal.SIGKILL) -> int:
    """Signals the job's trainer once `step` steps are logged. Returns its process id."""
    until(lambda: accrue.steps_logged(job_id) >= step)
    pid = accrue.trainer_of(job_id)
    assert pid is not None
    os.kill(pid, number)
    return pid


LOGGED = ("step", "loss", "learning_rate", "grad_norm", "tokens")
