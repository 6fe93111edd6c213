"""The gradient noise scale, measured during training.

The simple noise scale is B = tr(Σ) / |G|² (McCandlish et al. 2018, section 2.2): the batch at which the
noise of a step's gradient is as large as the gradient. Two gradient norms of a window give both parts
(appendix A.1 of that paper): that of its first micro-batch, drawn at random, and that of the whole window.

Here a sample's gradient g is the sum over its n target tokens, and a step's is Σ g / Σ n, so that the noise
of a sample is (g - n·G) / mean(n). With x = |Σ g|² over the b samples of the first micro-batch and their
m targets, and y, s, t for the window, E x = m²|G|² + b·R and E y = t²|G|² + s·R, with R = E|g - n·G|².
Both are solved for after averaging over windows, since a ratio of means is not a mean of ratios.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import sqrt

import numpy as np

from app.contract.reports import NoiseScale

HISTORY = 100
"""The number of recent measurements that are used: older ones are outdated, since the scale grows in
training."""

MIN_MEASUREMENTS = 8
"""The minimum number of measurements for an estimate."""

_Z = 1.6449
"""The quantile of the normal distribution for a 90 % interval."""


@dataclass(frozen=True)
class Measurement:
    """One window's two norms. The norms are those of the gradient divided by the whole window's targets."""

    first_norm: float
    first_samples: int
    first_targets: float
    norm: float
    samples: int
    targets: float

    def packed(self) -> list[float]:
        return list(astuple(self))


def estimate(measurements: Sequence[Sequence[float]]) -> NoiseScale | None:
    """The noise scale in samples, with Fieller's band for a ratio of means (Fieller 1954).

    Args:
        measurements: `Measurement.packed()` of each.

    Returns:
        The estimate, or None if there are too few measurements or the gradient's norm is lost in the noise.
    """
    if len(measurements) < MIN_MEASUREMENTS:
        return None
    first_norm, b, m, norm, samples, targets = np.asarray(measurements, dtype=np.float64).T
    x, y = (first_norm * targets) ** 2 / b, (norm * targets) ** 2 / samples
    lever = (m**2 / b - targets**2 / samples).mean()
    if lever == 0.0:
        return None
    squared = (x - y) / lever  # |G|², one unbiased but noisy value a window
    offset = (targets**2 / samples).mean()
    length = (targets / samples).mean()
    if squared.mean() <= 0.0:
        return None
    low, high = _fieller(y, squared)

    def scale(ratio: float) -> float:
        return float(max(0.0, (ratio - offset) / length**2))

    return NoiseScale(
        value=scale(y.mean() / squared.mean()),
        low=scale(low),
        high=None if high is None else scale(high),
        measurements=len(measurements),
    )


def _fieller(a: np.ndarray, b: np.ndarray) -> tuple[float, float | None]:
    """The 90 % band of mean(a) / mean(b); no upper end if mean(b) is not significantly different from
    zero."""
    count = len(a)
    t = _Z + (_Z**3 + _Z) / (4 * (count - 1))  # Student's t (Abramowitz and Stegun 26.7.5, first term)
    (aa, ab), (_, bb) = np.cov(a, b) / count
    mean_a, mean_b = a.mean(), b.mean()
    g = t**2 * bb / mean_b**2
    ratio = mean_a / mean_b
    inside = aa - 2 * ratio * ab + ratio**2 * bb - g * (aa - ab**2 / bb) if bb > 0 else aa
    middle, half = ratio - g * ab / bb if bb > 0 else ratio, t / mean_b * sqrt(max(0.0, inside))
    if g >= 1.0:
        return float(max(0.0, ratio - half)), None
    return float((middle - half) / (1 - g)), float((middle + half) / (1 - g))
