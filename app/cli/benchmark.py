"""`accrue benchmark`: measures what accumulation costs on the worker's device."""

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from app.cli.client import Client
from app.cli.options import DEFAULT_URL, AsJson, Url
from app.contract.architecture import BUILT_IN_MODEL
from app.errors import AccrueError

commands = typer.Typer()

_GUARANTEED = 0.02
_WARM_UP = 2
"""Windows of each job that are not counted."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz      "
_ROOT = "/gradient-accumulation/training"


@commands.command()
def benchmark(
    model: Annotated[str, typer.Option(help="Base model")] = BUILT_IN_MODEL,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of every micro-batch")] = 8,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of every sample")] = 128,
    steps: Annotated[
        str,
        typer.Option(
            help="Numbers of accumulation steps to compare, such as 1,4,16; the first is the baseline"
        ),
    ] = "1,16",
    micro_batches: Annotated[int, typer.Option(min=16, help="Micro-batches per job")] = 192,
    rounds: Annotated[int, typer.Option(min=1, help="Jobs per setting, run alternately")] = 3,
    png: Annotated[Path | None, typer.Option(help="Also draw a chart into this file", dir_okay=False)] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Measure what accumulation steps cost at a fixed micro-batch size, on generated texts.

    Jobs with different numbers of steps run alternately. For each window, the time per micro-batch is the
    window's time, optimizer step included, divided by its number of micro-batches. A job's time is the
    median over its windows. The slowdown is the median ratio of a job's time to that of the baseline's job
    in the same round. Accumulation itself should cost nothing: with 16 steps, expect a micro-batch to take at
    most 2 % longer than with one.
    """
    kinds = _step_counts(steps)
    with Client(url) as client:
        seconds = _measured(client, kinds, rounds, model, micro_batch, max_length, micro_batches, as_json)
    by_round = {kind: [median(own) for own in rounds] for kind, rounds in seconds.items()}
    found = {
        "model": model,
        "micro_batch_size": micro_batch,
        "max_length": max_length,
        "steps": [
            {
                "accumulation_steps": kind,
                "windows": sum(map(len, seconds[kind])),
                "seconds_per_micro_batch": median(by_round[kind]),
                "slowdown": _ratio(by_round[kind], by_round[kinds[0]]) - 1,
            }
            for kind in kinds
        ],
    }
    if png is not None:
        from app.results.charts import slowdown

        png.write_bytes(slowdown(found))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _show(found, png)


def _ratio(times: list[float], others: list[float]) -> float:
    """The median ratio of neighbouring measurements, since the load of a machine changes with time."""
    return median(time / other for time, other in zip(times, others, strict=True))


def _step_counts(steps: str) -> list[int]:
    try:
        kinds = [int(part) for part in steps.split(",")]
    except ValueError:
        kinds = []
    if len(set(kinds)) < 2 or len(set(kinds)) < len(kinds) or min(kinds) < 1:
        raise typer.BadParameter("two or more different counts, as in 1,4,16", param_hint="--steps")
    return kinds


def _measured(
    client: Client,
    kinds: list[int],
    rounds: int,
    model: str,
    micro_batch: int,
    max_length: int,
    micro_batches: int,
    quiet: bool,
) -> dict[int, list[list[float]]]:
    """Seconds per micro-batch of each window, by accumulation steps and job."""
    from app.cli.terminal import wait_for

    texts = [text for _, text in zip(range(micro_batch * max(kinds)), _texts(max_length), strict=False)]
    seconds: dict[int, list[list[float]]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            body = {
                "model_name": model,
                "dataset_config": {"texts": texts, "max_length": max_length},
                "training_config": {"max_steps": _WARM_UP + max(4, -(-micro_batches // kind))},
                "micro_batch_size": micro_batch,
                "accumulation_steps": kind,
                "auto_adjust_batch_size": False,
                "equivalence_check": False,
                "noise_scale_every": None,
                "metadata": {"made_by": "benchmark"},
            }
            job = client.post(f"{_ROOT}/with-accumulation", body)
            job = wait_for(client, job["id"], f"{kind} accumulation steps", quiet=quiet)
            if job["status"] != "succeeded":
                why = job["error"]["message"] if job["error"] else "it was cancelled"
                raise AccrueError(f"job {job['id']} is {job['status']}: {why}")
            lines = client.get(f"{_ROOT}/{job['id']}/metrics")["data"][_WARM_UP:]
            seconds[kind].append([_seconds(line) / kind for line in lines])
    return seconds


def _seconds(line: dict[str, Any]) -> float:
    parts = ("data_seconds", "forward_backward_seconds", "optimizer_seconds", "synchronise_seconds")
    return float(sum(line[part] for part in parts))


def _texts(length: int) -> Iterator[str]:
    """Random texts of at least `length` tokens with any tokenizer."""
    for seed in count():
        yield "".join(random.Random(seed).choices(_LETTERS, k=8 * length))


def _show(found: dict[str, Any], png: Path | None) -> None:
    from rich.table import Table

    from app.cli.terminal import console

    table = Table("accumulation steps", "windows", "ms per micro-batch", "slower", box=None)
    for row in found["steps"]:
        table.add_row(
            str(row["accumulation_steps"]), str(row["windows"]),
            f"{1000 * row['seconds_per_micro_batch']:.2f}",
            f"{row['slowdown']:+.1%}",
        )  # fmt: skip
    console.print(table)
    worst = max(row["slowdown"] for row in found["steps"])
    kept = "yes" if worst <= _GUARANTEED else "no. If other programs use this machine, end them, and repeat"
    console.print(f"Slower per micro-batch by at most {_GUARANTEED:.0%}: {kept}")
    if png is not None:
        console.print(f"chart: {png}")
