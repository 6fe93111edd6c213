"""Between measured points."""

from bisect import bisect_right
from collections.abc import Sequence


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """On the line between the two points around a place; beyond them all, the nearest one's value.

    Args:
        points: (place, value) by rising place; at least one.
    """
    above = bisect_right([place for place, _ in points], at)
    if above == 0:
        return points[0][1]
    if above == len(points):
        return points[-1][1]
    (low, first), (high, second) = points[above - 1 : above + 1]
    return first + (second - first) * (at - low) / (high - low)
