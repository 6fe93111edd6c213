"""Trains under recommended plans with capped memory: no run may need more than its plan allows.

Ten combinations, each on a device declared so small that memory decides the micro-batch, with data of
unequal lengths. The cap is the predicted peak of the plan plus the plan's safety margin. It is compared
with the peak of live tensor bytes over all windows but the first, from the allocator's events.
`make accuracy` runs it and writes results/recommended.json and recommended.md.
"""

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from app.contract.memory_profile import Recipe
from app.contract.plan import TokenBudget
from app.planning.devices import Device
from app.planning.estimate import ByFormula, ByProfile, Estimate
from app.planning.plan import make_plan
from app.planning.planner import PlannerEvidence
from app.planning.recipes import recipe_of
from tests.benchmarks.accuracy import FAMILIES, MIB, RESULTS, Case
from tests.benchmarks.true_peak import (
    CPU,
    ROOT,
    Inline,
    create_run,
    held_bytes,
    make_model,
    spec_of,
    write_lines,
)
from tests.harness.live_bytes import peak_of
from workers.profiling.profile import make_profile
from workers.reporter import Reporter
from workers.training.devices.memory import MemoryWatch
from workers.training.fit import advance
from workers.training.reporting.trackers import Trackers
from workers.training.start import start

EXAMPLES = 48
WINDOWS = 4
EFFECTIVE_BATCH = EXAMPLES // WINDOWS
ROWS_IN_MEMORY = 3.5
"""Rows of full length that the device has memory for."""

CASES = [
    Case("gpt2"),
    Case("llama"),
    Case("llama", options={"checkpointing": True}),
    Case("llama", options={"method": "lora"}),
    Case("llama", options={"packing": True}),
    Case("qwen3", options={"optimizer": "adafactor"}),
    Case("mistral", options={"precision": "bf16"}),
    Case("gemma2", options={"checkpointing": True}),
    Case("opt", options={"smoothing": True}),
    Case("mixtral"),
]


def train_capped(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Plans for a device with memory for a few rows, trains, and measures the peak."""
    folder.mkdir()
    random = np.random.default_rng(0)
    lengths = random.integers(8, 3 * requested["sequence"] // 2, EXAMPLES)
    letters = np.array(list("abcdefghij klmnop"))
    data = write_lines(folder / "data.jsonl", ["".join(random.choice(letters, n)) for n in lengths])
    spec = spec_of(requested, data, EXAMPLES).model_copy(
        update={"effective_batch_size": EFFECTIVE_BATCH, "max_steps": WINDOWS}
    )
    recipe = recipe_of(spec, CPU)
    profile = ByProfile(
        make_profile(requested["config"], recipe, requested["sequence"]).curve, recipe, "simulated"
    )
    share = spec.memory.budget(10**9) / 10**9
    device = Device("cpu", "CPU", int(profile.memory(ROWS_IN_MEMORY).peak_process_bytes / share), "cpu")

    def estimates(other: Recipe, sequence: int) -> Estimate:
        return profile if other == recipe else ByFormula(spec.model.architecture, other, sequence)

    plan = make_plan(
        spec,
        [device],
        PlannerEvidence(estimates, architecture=spec.model.architecture),
        predicted=False,
        threads=2,
    )
    rule = plan.ranks[0].micro_batch_rule
    assert isinstance(rule, TokenBudget)
    rows = rule.tokens / requested["sequence"]
    run = create_run(folder, spec, plan, data, make_model(requested["config"], folder / "model"))
    with Reporter(run, 1) as reporter, Trackers((), run.assignment(), run.path) as trackers:
        training, _ = start(run, run.assignment(), reporter, trackers, lambda: False)
        training.loader.executor = Inline()  # type: ignore[assignment]
        training.replica.memory = MemoryWatch(
            training.replica.device, 2**60
        )  # this process holds the simulation, too
        advance(training)
        held = held_bytes(training)
        peak = held + peak_of(lambda: [advance(training) for _ in range(WINDOWS - 1)])
    predicted = profile.memory(rows).peak_allocated_bytes
    margin = spec.memory.memory_safety_margin
    events = [json.loads(line)["type"] for line in run.events.read_text().splitlines()]
    return {"rows": rows, "predicted_bytes": predicted, "cap_bytes": int(predicted * (1 + margin)),
            "peak_bytes": peak, "recoveries": events.count("out_of_memory")}  # fmt: skip


def main() -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            requested = {"config": FAMILIES[case.family], "sequence": case.sequence, "rows": 1,
                     "micro_batches": 1, "options": case.options, "folder": f"{folder}/{number}"}  # fmt: skip
            command = [sys.executable, "-m", "tests.benchmarks.recommended", json.dumps(requested)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if "RESULT " not in done.stdout:
                raise SystemExit(f"{case} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            result = json.loads(done.stdout.split("RESULT ")[1])
            found.append({"family": case.family, "options": case.label, **result})
            sizes = f"{result['peak_bytes'] / MIB:.1f} of {result['cap_bytes'] / MIB:.1f} MiB"
            print(f"{case.family:9} {case.label:36} {result['rows']:g} rows: peak {sizes}", flush=True)
    write(found)
    over = [row for row in found if row["peak_bytes"] > row["cap_bytes"] or row["recoveries"]]
    print(f"{len(found) - len(over)} of {len(found)} stayed within the cap, without recovering from OOM")
    sys.exit(bool(over))


def write(found: list[dict[str, Any]]) -> None:
    """The figures, and a table."""
    about = {
        "date": datetime.now(UTC).date().isoformat(), "device": "CPU", "torch": version("torch"),
        "transformers": version("transformers"), "windows": WINDOWS, "sequence": CASES[0].sequence,
    }  # fmt: skip
    (RESULTS / "recommended.json").write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")
    lines = [
        f"{len(found)} jobs of {WINDOWS} windows, planned for a device with memory for {ROWS_IN_MEMORY} "
        "rows of "
        f"{CASES[0].sequence} tokens, on data of unequal lengths ({about['date']}, CPU, torch "
        f"{about['torch']}). The peak of live tensor bytes is compared with the prediction plus the margin. "
        "Repeat with `make accuracy`.",
        "",
        "| family | options | rows planned | predicted MiB | cap MiB | peak MiB | recoveries |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['family']} | {row['options']} | {row['rows']:g} | {row['predicted_bytes'] / MIB:.1f} | "
            f"{row['cap_bytes'] / MIB:.1f} | {row['peak_bytes'] / MIB:.1f} | {row['recoveries']} |"
            for row in found
        ),
    ]
    (RESULTS / "recommended.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        told = json.loads(sys.argv[1])
        print("RESULT " + json.dumps(train_capped(told, Path(told["folder"]))))
    else:
        main()
