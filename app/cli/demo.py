"""`accrue demo`: plans and trains a small model over HTTP, with a service and worker of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.cli import demo_data
from app.cli.client import Client, ServiceError
from app.cli.terminal import follow, show_batch_size, show_plan
from app.contract.architecture import BUILT_IN_MODEL
from app.errors import InvalidRequest
from app.results.charts import loss_curve
from app.runtime import processes

EFFECTIVE_BATCH = 64
MAX_LENGTH = 512
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
_START_SECONDS = 60.0
_MARK = ".accrue-demo"
"""An empty file in a folder that a demo made."""

console = Console()


def run(folder: Path, steps: int) -> int:
    """Runs the demo, from an empty folder to a trained model. Returns 0 if the model learned enough.

    Enough means that the final loss is at most half of the first, and below the loss of a model that knows
    only how frequent each byte is.
    """
    began = time.monotonic()
    _make_empty(folder)
    data = folder / "docstrings.jsonl"
    console.rule("Data: signatures and docstrings of this Python's standard library")
    count = demo_data.write(data)
    entropy = demo_data.byte_entropy(data)
    console.print(f"{count:,} samples in {data}; entropy of their bytes {entropy:.3f} nats")
    with service(folder) as client:
        console.rule("Plan")
        show_batch_size(_plan(client))
        console.rule("Train")
        job = _submit(client, data, steps)
        console.print(f"job {job['id']}")
        show_plan(job)
        console.print("Training takes about three minutes on a laptop's processor.")
        status = follow(client, job["id"], stays=False)
        if status == 0:
            status = _report(client, job["id"], folder, entropy)
    console.print(
        f"The demo took {time.monotonic() - began:.0f} s; its service has stopped. To see the job and its "
        f"curves: ACCRUE_DATA_DIR={folder / 'data'} accrue up. To train on your own data: accrue up, "
        "then accrue submit FILE --model MODEL."
    )
    return status


def _make_empty(folder: Path) -> None:
    """Makes a new folder, in place of an earlier demo's.

    Raises:
        InvalidRequest: the folder holds something else, which must not be deleted.
    """
    mark = folder / _MARK
    if folder.exists() and not mark.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(
            f"{folder} has content that is not an earlier demo's: move it away, or choose a new folder "
            "with --folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():  # it may be the folder in which this process works
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    mark.touch()


@contextmanager
def service(folder: Path) -> Iterator[Client]:
    """A service and a worker on a free port, with their data under `folder`; stopped on exit."""
    port = _free_port()
    env = {**os.environ, "ACCRUE_DATA_DIR": str((folder / "data").absolute()), "ACCRUE_PORT": str(port),
           "ACCRUE_HOST": "127.0.0.1"}  # fmt: skip
    with (folder / "service.log").open("wb") as log:
        running = [processes.start(part, env=env, log=log) for part in ("serve", "worker")]
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            _await(client, running, folder)
            console.print(f"service and worker at http://127.0.0.1:{port}, their log in {folder}/service.log")
            yield client
    finally:
        processes.end(running)


def _await(client: Client, running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if any(process.poll() is not None for process in running) or time.monotonic() > deadline:
            raise ServiceError(f"the service did not start: see {folder}/service.log")
        try:
            if client.get("/readyz")["workers"]:
                return
        except ServiceError:
            pass
        time.sleep(0.2)


def _plan(client: Client) -> Any:
    return client.post(
        "/gradient-accumulation/calculate-batch-size",
        {
            "model_name": BUILT_IN_MODEL,
            "target_effective_batch_size": EFFECTIVE_BATCH,
            "max_length": MAX_LENGTH,
        },
    )


def _submit(client: Client, data: Path, steps: int) -> Any:
    return client.post(
        "/gradient-accumulation/training/large-batch",
        {
            "model_name": BUILT_IN_MODEL,
            "dataset_config": {"file_id": client.upload(data)["id"], "max_length": MAX_LENGTH},
            "training_config": {
                "max_steps": steps,
                "learning_rate": LEARNING_RATE,
                "warmup_steps": min(WARMUP_STEPS, steps // 5),
                "lr_scheduler": "cosine",
                "weight_decay": 0.1,
                "optimizer_args": {"betas": [0.9, 0.95]},
            },
            "target_effective_batch_size": EFFECTIVE_BATCH,
            "metadata": {"made_by": "demo"},
        },
    )


def _report(client: Client, job_id: str, folder: Path, entropy: float) -> int:
    """Shows the results. Returns 0 if the losses meet the demo's criteria."""
    path = f"/gradient-accumulation/training/{job_id}"
    job, series = client.get(path), client.get(f"{path}/metrics")
    console.rule("Result")
    table = Table("statistics (GET /gradient-accumulation/stats/…)", "", box=None)
    for name, value in client.get(f"/gradient-accumulation/stats/{job_id}")["stats"].items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    title = f"{BUILT_IN_MODEL}, effective batch {EFFECTIVE_BATCH}"
    chart = loss_curve(series, folder / "loss.png", title, entropy)
    first, final = job["result"]["first_loss"], job["result"]["final_loss"]
    console.print(
        f"first loss {first:.3f}, final loss {final:.3f} ({final / first:.0%}); byte entropy {entropy:.3f}",
        f"model: {folder / 'data' / job['result']['model_path']}",
        f"loss curve: {chart}",
        sep="\n",
        highlight=False,
    )
    if final <= first / 2 and final < entropy:
        return 0
    console.print("The model learned less than it should: more steps would help.", style="red")
    return 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
