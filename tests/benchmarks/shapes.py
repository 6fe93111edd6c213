"""`make bench-trainer`, second part: five shapes of model and three mixes of lengths, beside Trainer.

The job's default plan, with nothing set by hand, runs against transformers' Trainer with and without grouping
by length, at several batch sizes. Shapes and mixes were chosen before any was measured. All runs of a case
have the same model, data, effective batch of 64, AdamW and fp32, and each is a process of its own. Figures
are medians of the rounds, in which the contestants take turns, every second round in the opposite order.
The later rounds leave out Trainer's settings that were clearly slower in the first. Writes
results/shapes.json and shapes.md.
"""

import argparse
import json
import platform
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.benchmarks.material import EFFECTIVE_BATCH, Size, docstrings, make_model, make_tokenizer
from tests.benchmarks.trainer import RESULTS, run

LEAST_AGAINST_8, LEAST_AGAINST_BEST, MOST_MEMORY = 2.0, 1.05, 1.0
"""The promises: speed relative to Trainer's batch of 8 and to its fastest setting, and memory relative to
that of the latter."""

SHAPES = {
    "tiny": Size(2, 64, 12),
    "deep and narrow": Size(16, 128, 4),
    "wide": Size(2, 768, 3),
    "long sequences": Size(4, 256, 2, max_length=2048),
    "vocabulary of 128k": Size(4, 256, 2, vocabulary=131_072),
}

MIXES = ("like Alpaca's", "short and long", "documents")

TRAINER = [(rows, False) for rows in (1, 8)] + [(rows, True) for rows in (2, 4, 8, 16)]
"""Batch size, and whether it is grouped by length."""

BATCH_OF_8 = "Trainer, batch 8"

CLEARLY_SLOWER = 0.8
"""Speed relative to Trainer's fastest setting in the first round. A setting below it takes no part in later
rounds: single runs on a shared machine vary by up to 15 %."""


@dataclass(frozen=True)
class Case:
    """A shape of model and a mix of lengths."""

    shape: str
    mix: str

    @property
    def size(self) -> Size:
        return SHAPES[self.shape]

    def lengths(self) -> list[int]:
        """The samples' lengths in tokens: log-normal like instructions or documents, or mostly short ones."""
        random, most = np.random.default_rng(11), self.size.max_length
        count = self.size.windows * EFFECTIVE_BATCH
        if self.mix == "short and long":
            long = random.integers(most // 2, most, count)
            found = np.where(random.random(count) < 0.8, random.integers(15, 60, count), long)
        else:
            middle, spread = (76.0, 0.6) if self.mix == "like Alpaca's" else (most / 4, 0.7)
            found = random.lognormal(np.log(middle), spread, count)
        lengths: list[int] = np.clip(found, 8, most - 1).astype(int).tolist()
        return lengths

    def write(self, path: Path) -> None:
        """Texts of these lengths, cut from the library's docstrings."""
        texts = docstrings()
        tokenizer = make_tokenizer(texts)
        order = np.random.default_rng(3).permutation(len(texts))
        ids = tokenizer(" ".join(texts[i] for i in order)).input_ids
        at, lines = 0, []
        for length in self.lengths():
            at = 0 if at + length > len(ids) else at
            lines.append(json.dumps({"text": tokenizer.decode(ids[at : at + length])}) + "\n")
            at += length
        path.write_text("".join(lines))


def measure(case: Case, base: Path, rounds: int) -> dict[str, Any]:
    """Runs every contestant on a case."""
    base.mkdir()
    data, model, size = base / "data.jsonl", base / "model", case.size
    case.write(data)
    make_model(size, model, docstrings())
    common = {
        "model": str(model), "windows": size.windows, "data": str(data), "max_length": size.max_length,
    }  # fmt: skip
    contestants: dict[str, dict[str, Any]] = {"Accrue": {**common, "who": "accrue"}}
    for rows, grouped in TRAINER:
        name = f"Trainer, batch {rows}{', grouped' if grouped else ''}"
        contestants[name] = {**common, "who": "hugging_face", "rows": rows, "grouped": grouped}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    taking_part = list(contestants)
    for number in range(rounds):
        for name in taking_part if number % 2 == 0 else reversed(taking_part):
            ran = run(contestants[name], base / "run")
            found[name].append({
                "samples_per_second": ran["samples"] / ran["seconds"], "peak_mib": ran["peak_bytes"] / 2**20,
            })  # fmt: skip
        if number == 0:
            taking_part = _still_in_question({name: runs[0] for name, runs in found.items()})
    figures = {
        name: {of: median(each[of] for each in runs) for of in runs[0]} | {"runs": runs}
        for name, runs in found.items()
    }
    return {"case": f"{case.shape}, {case.mix}", "contestants": figures, **_compared(figures)}


def _still_in_question(first: dict[str, dict[str, float]]) -> list[str]:
    """The contestants of the later rounds: Accrue, the batch of 8, and all that may be Trainer's fastest."""
    speeds = {name: ran["samples_per_second"] for name, ran in first.items()}
    fastest = max(speed for name, speed in speeds.items() if name != "Accrue")
    return [
        name for name, speed in speeds.items()
        if name in ("Accrue", BATCH_OF_8) or speed >= CLEARLY_SLOWER * fastest
    ]  # fmt: skip


def _compared(figures: dict[str, Any]) -> dict[str, Any]:
    ours = figures["Accrue"]
    theirs = {name: own for name, own in figures.items() if name != "Accrue"}
    best = max(theirs, key=lambda name: theirs[name]["samples_per_second"])
    speed = ours["samples_per_second"]
    against_8 = speed / theirs[BATCH_OF_8]["samples_per_second"]
    against_best = speed / theirs[best]["samples_per_second"]
    memory = ours["peak_mib"] / theirs[best]["peak_mib"]
    holds = against_8 >= LEAST_AGAINST_8 and against_best >= LEAST_AGAINST_BEST and memory <= MOST_MEMORY
    return {
        "against_8": against_8, "best": best, "against_best": against_best, "memory": memory, "holds": holds,
    }  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# The default plan against Trainer's settings\n",
        f"{result['machine']}. {result['date']}. `python -m tests.benchmarks.shapes`, medians of "
        f"{result['rounds']} rounds. Promised: at least {LEAST_AGAINST_8:g} times the speed of batch 8, at "
        f"least {LEAST_AGAINST_BEST:g} times that of Trainer's fastest setting, with no more memory than "
        "it.\n",
        "| shape and lengths | samples/s | relative to batch 8 | fastest of Trainer's | relative to it | "
        "memory relative to it | holds |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for row in result["cases"]:
        speed, best = row["contestants"]["Accrue"]["samples_per_second"], row["best"]
        lines.append(
            f"| {row['case']} | {speed:.1f} | {row['against_8']:.2f} | {best.removeprefix('Trainer, ')}"
            f" | {row['against_best']:.2f} | {row['memory']:.2f} | {'yes' if row['holds'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="cases, each as shape:mix")
    parser.add_argument("--save", action="store_true", help="write results/shapes.json and shapes.md")
    given = parser.parse_args()
    cases = [Case(shape, mix) for shape, mix in product(SHAPES, MIXES)]
    if given.only:
        cases = [case for case in cases if f"{case.shape}:{case.mix}" in given.only]
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"CPU, 2 threads ({platform.machine()}), torch {version('torch')}, transformers "
        f"{version('transformers')}",
        "rounds": given.rounds,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            row = measure(case, Path(folder) / str(number), given.rounds)
            result["cases"].append(row)
            print(f"{row['case']:40} {row['against_8']:5.2f} times batch 8, {row['against_best']:5.2f} times "
                  f"{row['best']}, {row['memory']:5.2f} of its memory", flush=True)  # fmt: skip
            if given.save:
                (RESULTS / "shapes.json").write_text(json.dumps(result, indent=1) + "\n")
                (RESULTS / "shapes.md").write_text(render(result))
    if not all(row["holds"] for row in result["cases"]):
        raise SystemExit("some promises do not hold")


if __name__ == "__main__":
    main()
