"""Everything that Accrue promises of a GPU, measured in at most ten minutes:

    python -m tests.gpu.acceptance [--device cpu] [--only part …] [--out gpu.json]

It needs torch, transformers, peft, accelerate, pyarrow and pydantic; no service, network or pytest. Results
are written after each check, so that a run that is cut off leaves what it has measured; `--only` adds parts
to those that the file has from the same day. A line for each check says whether it holds. With
`--device cpu`, parts that need CUDA are reported as not run, and the others run on small models, which shows
that they work.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from tests.gpu import kernels, runs
from tests.gpu.checks import Check, Place

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Part = Callable[[Place, dict[str, Any]], Iterator[Check]]
"""Measures something: adds figures to a dictionary, and yields each check as soon as it was made."""


@dataclass(frozen=True)
class Entry:
    """A part of the acceptance test."""

    name: str
    run: Part
    on: Literal["both", "cuda"] = "both"


PARTS = (
    Entry("environment", kernels.environment),
    Entry("attention", kernels.attention),
    Entry("throughput beside Trainer", runs.throughput),
    Entry("throughput of a step", kernels.steps),
    Entry("reads from the device", runs.reads, "cuda"),
    Entry("out of memory", runs.out_of_memory, "cuda"),
    Entry("resume", runs.resume),
    Entry("certificate", runs.certificates),
    Entry("features", runs.features),
    Entry("memory", kernels.memory, "cuda"),  # takes the longest
)


def accept(place: Place, parts: tuple[Entry, ...], out: Path | None) -> list[Check]:
    """Runs the parts, and prints and writes their results. A part that fails becomes a check that does not
    hold."""
    checks: list[Check] = []
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if place.kind == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }
    result["parts"] = _known_parts(result, out)

    def write() -> None:
        if out is not None:
            out.write_text(json.dumps(result, indent=1, default=str) + "\n")

    for part in parts:
        if part.on == "cuda" and place.kind == "cpu":
            print(f"-- {part.name}: not run, needs CUDA", flush=True)
            result["parts"][part.name] = "not run: needs CUDA"
            write()
            continue
        print(f"-- {part.name}", flush=True)
        own = result["parts"][part.name] = {"seconds": 0.0, "figures": {}, "checks": []}
        began = time.perf_counter()
        for check in _checks_of(part, place, own["figures"]):
            print(f"   {check.line}", flush=True)
            checks.append(check)
            own["checks"].append(asdict(check))
            own["seconds"] = round(time.perf_counter() - began, 1)
            write()
        own["seconds"] = round(time.perf_counter() - began, 1)
        write()
        place.clear()
    return checks


def _known_parts(now: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The parts that were measured before on this day, with this device and version."""
    if out is None or not out.exists():
        return {}
    known: dict[str, Any] = json.loads(out.read_text())
    is_same = all(known.get(name) == value for name, value in now.items())
    parts: dict[str, Any] = known.get("parts", {}) if is_same else {}
    return parts


def _checks_of(part: Entry, place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """The checks of a part; the last one says so if the part failed."""
    try:
        yield from part.run(place, figures)
    except Exception as error:
        traceback.print_exc()
        yield Check(f"{part.name} runs", f"{type(error).__name__}: {error}", "runs", False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=[part.name for part in PARTS], help="these parts alone")
    parser.add_argument("--out", type=Path, help="where to write the results; on a GPU, with the others")
    given = parser.parse_args(arguments)
    out: Path | None = given.out
    if given.device == "cuda":
        if not torch.cuda.is_available():
            print("There is no NVIDIA GPU here. --device cpu tries the parts that need none.")
            return 0
        out = out or RESULTS / f"gpu-{torch.cuda.get_device_name().lower().replace(' ', '-')}.json"
    parts = tuple(part for part in PARTS if given.only is None or part.name in given.only)
    with tempfile.TemporaryDirectory() as folder:
        checks = accept(Place(given.device, Path(folder)), parts, out)
    failed = [check for check in checks if not check.holds]
    print(f"\n{len(checks) - len(failed)} of {len(checks)} checks hold.")
    for check in failed:
        print(check.line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
