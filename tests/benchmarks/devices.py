"""`make bench-devices`: two ranks compared with one, with Trainer under torchrun, and unequal ranks.

On a machine with two cores, each rank has one thread. All train the same Llama on the library's docstrings,
with the same data, effective batch of 64, AdamW and fp32. Of two unequal ranks, one has a third of the token
budget, and each of its micro-batches takes twice as long. Figures are medians of several rounds, in which the
contestants take turns. Writes results/devices.json and devices.md.

Two ranks on one processor share its caches and memory, so that neither is as fast as alone. Devices of their
own would not. So unequal ranks are also measured on emulated devices: a token takes a fixed time there, about
twice as long as it takes to compute it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from app.contract.plan import TokenBudget
from tests.benchmarks.material import (
    EFFECTIVE_BATCH,
    MAX_LENGTH,
    Size,
    create_run,
    make_model,
    texts_in,
    write_docstrings,
)
from tests.harness.runs import start_ranks, with_ranks
from tests.harness.training import raw_log

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
MODEL = Size(4, 256, 24)
BUDGET = 1536
WARM_UP = 8
"""Windows that are not timed: in them, ranks measure each other's speed."""


@dataclass(frozen=True)
class Rank:
    tokens: int = BUDGET
    factor: float = 1.0
    """How many times as long its micro-batches take, compared with one that is not slowed down."""


FAST, SLOW = Rank(), Rank(BUDGET // 3, 2.0)
FAST_DEVICE, SLOW_DEVICE = Rank(BUDGET, 2.0), Rank(BUDGET // 3, 4.0)


@dataclass(frozen=True)
class Contestant:
    ranks: tuple[Rank, ...]
    equal: bool = False
    """Whether both ranks get an equal part of each window."""
    threads: int = 1
    emulated: bool = False
    """Whether the time of a token is fixed."""


FIRST = "1 rank, 1 thread"
OURS = {
    FIRST: Contestant((FAST,)),
    "1 rank, 2 threads": Contestant((FAST,), threads=2),
    "2 ranks": Contestant((FAST, FAST)),
    "the slow rank alone": Contestant((SLOW,)),
    "unequal ranks": Contestant((FAST, SLOW)),
    "unequal ranks, equal parts": Contestant((FAST, SLOW), equal=True),
    "a fast device": Contestant((FAST_DEVICE,), emulated=True),
    "a slow device": Contestant((SLOW_DEVICE,), emulated=True),
    "both devices": Contestant((FAST_DEVICE, SLOW_DEVICE), emulated=True),
    "both devices, equal parts": Contestant((FAST_DEVICE, SLOW_DEVICE), equal=True, emulated=True),
}
TRAINER = {"Trainer, 1 process, 2 threads": (1, 2), "Trainer, 2 processes under torchrun": (2, 1)}


def ours(contestant: Contestant, material: Path, folder: Path, per_token: float) -> dict[str, Any]:
    """Trains with one or several ranks.

    Args:
        per_token: the seconds that a padded token takes on one rank that is not slowed down.
    """
    run = create_run(
        folder,
        material / "model",
        material / "data.jsonl",
        None,
        MODEL.windows,
        MAX_LENGTH,
        contestant.threads,
    )
    count = len(contestant.ranks)
    with_ranks(run, [1 / count] * count)
    _set_budgets(run, [rank.tokens for rank in contestant.ranks])
    options = [name for name in ("equal", "emulated") if getattr(contestant, name)]
    unit = per_token if contestant.emulated else 1.0
    factors = [rank.factor * unit for rank in contestant.ranks]
    processes = start_ranks(run, [0.0] * count, factors, *options)
    if any(process.wait() for process in processes):
        raise SystemExit(run.trainer_log.read_text()[-3000:])
    lines = raw_log(run)
    timed = lines[WARM_UP:]
    seconds = timed[-1]["time"] - lines[WARM_UP - 1]["time"]
    peaks = (
        [rank["peak_gb"] * 1024 for rank in lines[-1]["ranks"]]
        if count > 1
        else [lines[-1]["peak_gb"] * 1024]
    )
    return {
        "samples_per_second": sum(line["samples"] for line in timed) / seconds,
        "peak_mib": peaks,
        "losses": [line["loss"] for line in lines],
        "idle": _idle(timed) if count > 1 else None,
        "per_token": sum(line["forward_backward_seconds"] for line in timed)
        / sum(line["padded_tokens"] for line in timed),
    }


def _set_budgets(run: Any, budgets: Sequence[int]) -> None:
    assignment = run.assignment()
    ranks = tuple(
        rank.model_copy(update={"micro_batch_rule": TokenBudget(tokens=tokens)})
        for rank, tokens in zip(assignment.plan.ranks, budgets, strict=True)
    )
    plan = assignment.plan.model_copy(update={"ranks": ranks})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))


def _idle(lines: Sequence[dict[str, Any]]) -> list[float]:
    """The share of time for which each rank waited for the other."""
    found = []
    for rank in range(len(lines[0]["ranks"])):
        idle = sum(line["ranks"][rank]["idle_seconds"] for line in lines)
        worked = sum(line["ranks"][rank]["seconds"] for line in lines)
        found.append(idle / (idle + worked))
    return found


def trainer(processes: int, threads: int, material: Path, folder: Path) -> dict[str, Any]:
    """transformers' Trainer, whose micro-batches of 8 have about the padding that its users get."""
    requested = {
        "who": "hugging_face", "rows": 8, "grouped": False, "threads": threads, "folder": str(folder),
        "model": str(material / "model"), "data": str(material / "data.jsonl"), "windows": MODEL.windows,
        "max_length": MAX_LENGTH,
    }  # fmt: skip
    start = ["-m", "tests.benchmarks.contestants", json.dumps(requested)]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *start]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *start], capture_output=True, text=True, cwd=ROOT, check=False, env=environment
    )
    if "RESULT " not in done.stdout:
        raise SystemExit(f"Trainer failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    return {
        "samples_per_second": result["samples"] / result["seconds"],
        "peak_mib": [result["peak_bytes"] / 2**20],
        "losses": result["losses"],
        "idle": None,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Runs all contestants in turns."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as base:
        material = Path(base)
        write_docstrings(material / "data.jsonl", MODEL.windows * EFFECTIVE_BATCH)
        make_model(MODEL, material / "model", texts_in(material / "data.jsonl"))
        for number in range(rounds):
            for name, contestant in OURS.items():
                per_token = found[FIRST][0]["per_token"] if found else 0.0
                result = ours(contestant, material, material / f"{name} {number}", per_token)
                found.setdefault(name, []).append(result)
                _tell(number, name, found)
            for name, (processes, threads) in TRAINER.items():
                found.setdefault(name, []).append(trainer(processes, threads, material, material / "trainer"))
                _tell(number, name, found)
    return {
        name: {
            "samples_per_second": median(each["samples_per_second"] for each in results),
            "rounds": [each["samples_per_second"] for each in results],
            "peak_mib": results[-1]["peak_mib"],
            "idle": results[-1]["idle"],
            "losses": results[-1]["losses"],
        }
        for name, results in found.items()
    }


def _tell(number: int, name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    print(f"round {number + 1}: {name:38} {found[name][-1]['samples_per_second']:7.1f} samples/s", flush=True)


def promises(measured: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """For each promise its name, the bound, the measured value, and whether it holds."""
    speed = {name: own["samples_per_second"] for name, own in measured.items()}
    alone = speed["a fast device"] + speed["a slow device"]
    first, other = measured[FIRST]["losses"], measured["unequal ranks"]["losses"]
    curve = max(abs(a - b) / b for a, b in zip(other, first, strict=True))
    least = [
        ("both devices, relative to the sum of both alone, at least", 0.92, speed["both devices"] / alone),
        (
            "both devices, relative to equal parts, at least",
            1.3,
            speed["both devices"] / speed["both devices, equal parts"],
        ),
        (
            "unequal ranks, relative to equal parts, at least",
            1.3,
            speed["unequal ranks"] / speed["unequal ranks, equal parts"],
        ),
        (
            "2 ranks, relative to Trainer under torchrun, at least",
            1.0,
            speed["2 ranks"] / speed["Trainer, 2 processes under torchrun"],
        ),
    ]
    return [
        *((name, bound, value, value >= bound) for name, bound, value in least),
        ("relative difference of the loss curves, at most", 1e-4, curve, curve <= 1e-4),
    ]


def render(result: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Several devices\n",
        f"{result['machine']}. {result['date']}. `make bench-devices`, medians of {result['rounds']}. "
        f"{result['model']}.\n",
        "| contestant | samples/s | peak MiB of each rank | idle |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, own in result["contestants"].items():
        peaks = ", ".join(f"{peak:.0f}" for peak in own["peak_mib"])
        idle = ", ".join(f"{share:.0%}" for share in own["idle"]) if own["idle"] else ""
        lines.append(f"| {name} | {own['samples_per_second']:.1f} | {peaks} | {idle} |")
    lines.append("\n| promise | bound | measured | holds |\n| --- | ---: | ---: | --- |")
    for name, bound, value, holds in promises(result["contestants"]):
        lines.append(f"| {name} | {bound:g} | {value:.3g} | {'yes' if holds else 'NO'} |")
    lines.append(
        "\nPeaks are resident memory: of the whole process for ranks, of what training added for Trainer "
        "(of its "
        "first process).\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    result: dict[str, Any] = {
        "machine": f"CPU, 2 cores ({platform.machine()}), Python {platform.python_version()}, {packages}",
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": rounds,
        "model": (
            f"Llama, {MODEL.layers} layers × {MODEL.width}, {MODEL.windows} windows of {EFFECTIVE_BATCH}"
        ),
        "contestants": measure(rounds),
    }
    (RESULTS / "devices.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "devices.md").write_text(render(result))
    print(render(result))


if __name__ == "__main__":
    main()
