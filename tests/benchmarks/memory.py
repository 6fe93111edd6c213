"""`make bench-memory`: peak memory of a window of 64 samples in 1 to 64 accumulation steps.

The peak is measured as live tensor bytes of the trainer's own window on the CPU, and predicted by simulation.
The batch is the same in all cases, and so is the gradient. Writes results/memory.json and memory.png.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from app.contract.memory_profile import Recipe
from app.planning.devices import MIB
from app.planning.estimate import ByProfile, Estimate
from tests.benchmarks.accuracy import FAMILIES, Case, true_bytes
from tests.benchmarks.api import machine
from workers.profiling.profile import make_profile

RESULTS = Path(__file__).parent / "results"
BATCH, SEQUENCE = 64, 128
STEPS = (1, 2, 4, 8, 16, 32, 64)
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, gradient checkpointing": {"checkpointing": True},
    "lora": {"method": "lora"},
}


def measured(name: str, folder: Path) -> list[dict[str, Any]]:
    """Measures the peaks of one way to train, by number of accumulation steps."""
    points: list[dict[str, Any]] = []
    estimate: Estimate | None = None
    for steps in STEPS:
        rows = BATCH // steps
        case = Case("llama", rows=rows, sequence=SEQUENCE, micro_batches=steps, options=WAYS[name])
        true = true_bytes(case, folder / str(steps))
        if estimate is None:
            recipe = Recipe.model_validate(true["recipe"])
            estimate = ByProfile(make_profile(FAMILIES["llama"], recipe, SEQUENCE).curve, recipe, "simulated")
        predicted = estimate.memory(rows, accumulating=steps > 1).peak_allocated_bytes
        points.append(
            {
                "way": name,
                "accumulation_steps": steps,
                "micro_batch": rows,
                "true_bytes": true["bytes"],
                "predicted_bytes": predicted,
            }
        )
        sizes = f"{true['bytes'] / MIB:.1f} MiB, predicted {predicted / MIB:.1f}"
        print(f"  {name}, {steps} × {rows}: {sizes}", flush=True)
    return points


def draw(points: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, colour in zip(WAYS, ("#1f5fa8", "#b35900", "#6639ba"), strict=True):
        own = [point for point in points if point["way"] == name]
        steps = [point["accumulation_steps"] for point in own]
        axes.plot(steps, [point["true_bytes"] / MIB for point in own], "o-", color=colour, label=name)
        axes.plot(steps, [point["predicted_bytes"] / MIB for point in own], "x", color=colour, markersize=9)
    axes.plot([], [], "x", color="#555555", label="predicted by simulation")
    axes.set(
        xscale="log", yscale="log", xlabel="accumulation steps", ylabel="peak of live tensors, MiB",
        title=f"A window of {BATCH} samples of {SEQUENCE} tokens: the same gradient in less memory",
    )  # fmt: skip
    axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
    axes.minorticks_off()
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def main() -> None:
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(WAYS):
            (Path(folder) / str(place)).mkdir()
            points += measured(name, Path(folder) / str(place))
    told = {"machine": machine(), "effective_batch_size": BATCH, "sequence": SEQUENCE, "points": points}
    (RESULTS / "memory.json").write_text(json.dumps(told, indent=1) + "\n")
    draw(points, RESULTS / "memory.png")


if __name__ == "__main__":
    main()
