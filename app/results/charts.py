"""Charts as PNG files."""

import io
from pathlib import Path
from typing import Any

from app.results.schemas import Comparison


def loss_curve(metrics: dict[str, Any], path: Path, title: str, entropy: float | None = None) -> Path:
    """Draws loss, its moving average, the loss on held-out samples and the learning rate over the steps.

    Args:
        metrics: a job's metrics, as the API returns them.
        entropy: of the byte frequencies, in nats; drawn as the loss of a model that knows only these.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = metrics["data"]
    held = [each for each in metrics["evaluations"] if each["loss"] is not None]
    steps = [point["step"] for point in series]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [point["loss"] for point in series], color="#9dbbe0", linewidth=1, label="loss")
    axes.plot(steps, [point["loss_ema"] for point in series], color="#1f5fa8", label="moving average")
    if held:
        at, losses = [each["step"] for each in held], [each["loss"] for each in held]
        axes.plot(at, losses, color="#3f8f5f", marker="o", markersize=3, label="on held-out samples")
    if entropy is not None:
        axes.axhline(entropy, color="#777777", linestyle=":", label="byte frequencies alone")
    rate = axes.twinx()
    rate.plot(steps, [point["learning_rate"] for point in series], color="#d98c3f", linewidth=1)
    rate.set_ylabel("learning rate", color="#b06a20")
    of_samples = any(point.get("rewards") for point in series)
    unit = "loss" if of_samples else "loss, nats per token"
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)
    return path


def slowdown(found: dict[str, Any]) -> bytes:
    """Draws the time of a micro-batch by accumulation steps. Returns a PNG's bytes.

    Args:
        found: as `accrue benchmark --json` prints it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = found["steps"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    names = [str(row["accumulation_steps"]) for row in rows]
    bars = axes.bar(
        names, [1000 * row["seconds_per_micro_batch"] for row in rows], color="#1f5fa8", width=0.6
    )
    axes.bar_label(bars, [f"{row['slowdown']:+.1%}" for row in rows])
    title = f"{found['model']}, micro-batches of {found['micro_batch_size']} × {found['max_length']} tokens"
    axes.set(xlabel="accumulation steps", ylabel="ms per micro-batch, including the optimizer", title=title)
    axes.grid(axis="y", alpha=0.3)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(out, dpi=120, format="png")
    return out.getvalue()


def comparison(compared: Comparison) -> bytes:
    """Draws the losses of several jobs over the samples that each has seen. Returns a PNG's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for job in compared.jobs:
        ratio = "" if job.noise_ratio is None else f", noise x {job.noise_ratio:.2f}"
        label = f"…{job.training_id[-6:]}: batch {job.effective_batch_size}{ratio}"
        axes.plot(compared.samples_seen, compared.loss[job.training_id], label=label)
    ylabel = f"loss (mean of the last {compared.averaged_samples:,} samples)"
    axes.set(xlabel="samples seen", ylabel=ylabel)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(out, dpi=120, format="png")
    return out.getvalue()
