"""`make bench-variance`: how much window losses scatter at micro-batch 2 with 1, 4 and 16 accumulation steps.

It trains the built-in model on the standard library's docstrings, always with the same learning rate and
number of steps. The variance is that of the last steps' losses around a line fitted to them, so that the
progress of learning does not count. Writes results/variance.json and variance.png.
"""

import hashlib
import json
import platform
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.contract.plan import FixedSize
from tests.benchmarks.material import write_docstrings
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from workers.reporter import Reporter
from workers.training.fit import fit

RESULTS = Path(__file__).parent / "results"
STEPS, COUNTED, MICRO_BATCH = 160, 120, 2


def losses_at(accumulation: int, folder: Path) -> list[float]:
    """The window losses of a run."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_docstrings(data, 5000)
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    spec = make_spec(
        data=small_data(examples=5000, max_length=128, sha256=digest), max_steps=STEPS,
        effective_batch_size=MICRO_BATCH * accumulation, optimizer=make_optimizer("adamw", 5e-4),
        schedule=make_schedule("constant"), save_every=10**6,
    )  # fmt: skip
    run = create_run(folder / f"run{accumulation}", spec, rule=FixedSize(samples=MICRO_BATCH), threads=2)
    with Reporter(run, 1) as reporter:
        fit(run, run.assignment(), reporter, lambda: False)
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def residual_variance(losses: list[float]) -> float:
    """Variance around a straight line, over the last COUNTED steps."""
    last, steps = np.array(losses[-COUNTED:]), np.arange(COUNTED)
    return float(np.var(last - np.polyval(np.polyfit(steps, last, 1), steps)))


def draw(curves: dict[int, list[float]], variances: dict[int, float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5))
    for (accumulation, losses), color in zip(curves.items(), ("#bdc3c7", "#2980b9", "#c0392b"), strict=True):
        axis.plot(range(1, STEPS + 1), losses, color=color, linewidth=1.2,
                  label=f"accumulation {accumulation}: variance {variances[accumulation]:.4f}")  # fmt: skip
    axis.set(title=f"Window losses, micro-batch {MICRO_BATCH}", xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        curves = {accumulation: losses_at(accumulation, Path(folder)) for accumulation in (1, 4, 16)}
    variances = {accumulation: residual_variance(losses) for accumulation, losses in curves.items()}
    result: dict[str, Any] = {
        "machine": f"CPU, 2 threads ({platform.machine()}), torch {version('torch')}",
        "date": datetime.now(UTC).date().isoformat(),
        "micro_batch": MICRO_BATCH,
        "variance": variances,
        "ratio_16_to_1": variances[16] / variances[1],
        "losses": curves,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "variance.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(curves, variances, RESULTS / "variance.png")
    for accumulation, variance in variances.items():
        print(f"accumulation {accumulation:2}: variance of the loss {variance:.5f}")
    print(f"variance at 16 relative to 1: {result['ratio_16_to_1']:.3f} (promised: at most 0.5)")


if __name__ == "__main__":
    main()
