"""Measures what a micro-batch costs besides its tokens.

A device needs time for even the smallest micro-batch, since a GPU waits until the host has started each of
its kernels. How many tokens it could have trained meanwhile depends on the model, the GPU and the host, by
more than an order of magnitude. So it is measured: the time of a micro-batch is a + b × tokens, and its fixed
cost is a / b tokens.
"""

from collections.abc import Sequence

import numpy as np

from workers.training.devices.stopwatch import Lap

WINDOWS = 4
"""The minimum number of windows that are measured before the fixed cost is decided."""

ROUNDS = 3
"""It is measured at most this many times: another cut gives micro-batches of other sizes, which tell more."""

SAME = 1.5
"""A cost that differs by less than this factor is not worth another cut."""

MOST = float(2**24)
"""Larger costs are all alike: a window is cut into as few micro-batches as possible."""

LEAST_LAPS = 8
"""The minimum number of micro-batches that are measured."""

_MOST_LAPS = 256
"""More add little, and the time grows with the square of their number."""

_LEAST_SPREAD = 1.3
"""The largest micro-batch must have this many times the tokens of the smallest one."""


def thinned(laps: Sequence[Lap]) -> list[Lap]:
    """At most 256 of the laps, evenly spread."""
    if len(laps) <= _MOST_LAPS:
        return list(laps)
    return [laps[at] for at in np.linspace(0, len(laps) - 1, _MOST_LAPS).astype(int)]


def fixed_cost_of(laps: Sequence[Lap]) -> float | None:
    """The fixed cost of a micro-batch in tokens, at least 1; None if the measurements do not tell.

    The slope is the median of those between all pairs of micro-batches (Theil 1950, Sen 1968), so that single
    ones that were slow for another reason do not count.
    """
    laps = thinned(laps)
    tokens = np.array([lap.tokens for lap in laps], dtype=float)
    seconds = np.array([lap.seconds for lap in laps], dtype=float)
    if len(laps) < LEAST_LAPS or tokens.max() < _LEAST_SPREAD * tokens.min():
        return None
    one, other = np.triu_indices(len(laps), 1)
    apart = tokens[other] - tokens[one]
    far = np.abs(apart) >= 0.1 * (tokens.max() - tokens.min())
    slope = float(np.median((seconds[other] - seconds[one])[far] / apart[far]))
    start = float(np.median(seconds - max(slope, 0.0) * tokens))
    if start <= 0.0:
        return 1.0
    return MOST if slope <= start / MOST else max(1.0, start / slope)
