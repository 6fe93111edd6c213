"""Charts as PNG files."""

from pathlib import Path
from typing import Any


def loss_curve(series: list[dict[str, Any]], path: Path, title: str, entropy: float | None = None) -> Path:
    """Draws loss, its moving average and the learning rate over the steps.

    Args:
        series: the points of a job's metrics.
        entropy: nats; drawn as the loss of knowing only how often each byte occurs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [point["step"] for point in series]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [point["loss"] for point in series], color="#9dbbe0", linewidth=1, label="loss")
    axes.plot(steps, [point["loss_ema"] for point in series], color="#1f5fa8", label="moving average")
    if entropy is not None:
        axes.axhline(entropy, color="#777777", linestyle=":", label="bytes alone")
    rate = axes.twinx()
    rate.plot(steps, [point["learning_rate"] for point in series], color="#d98c3f", linewidth=1)
    rate.set_ylabel("learning rate", color="#b06a20")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)
    return path
