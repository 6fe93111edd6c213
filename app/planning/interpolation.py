"""Linear interpolation between measured points."""

from bisect import bisect_right
from collections.abc import Sequence


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates linearly at a position; beyond all points, returns the value of the nearest one.

    Args:
        points: (position, value) by increasing position; at least one.
    """
    above = bisect_right([place for place, _ in points], at)
    if above == 0:
        return points[0][1]
    if above == len(points):
        return points[-1][1]
    (low, first), (high, second) = points[above - 1 : above + 1]
    return first + (second - first) * (at - low) / (high - low)
