"""Divides a window's samples among ranks, so that all of them finish at about the same time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.training.batches import BudgetCosts, Lengths, costs_of_longest

_PRECISION = 0.002
"""The time of a window is found to this relative precision, unless single samples are coarser."""


def partition_by_length(
    lengths: Lengths,
    shares: Sequence[float],
    budgets: Sequence[BudgetCosts],
    *,
    head_start: Sequence[float] = (),
) -> list[list[int]]:
    """The positions in the window that each rank takes, each position exactly once.

    Each rank takes samples of similar length, which can be cut with little padding: the rank with the largest
    token budget takes the longest samples, and so on. A rank's time is predicted from the cost of its
    micro-batches. The window's time, which is that of its slowest rank, is found by bisection: if each rank
    takes as many samples as it can finish in that time, all samples must be taken. The result depends on
    nothing but the arguments.

    Args:
        lengths: tokens of each sample of the window.
        shares: each rank's speed, relative to the others.
        budgets: each rank's token budget, and what micro-batches cost within it.
        head_start: the cost of what each rank already has, in tokens; none if empty.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    ranks = sorted(range(len(shares)), key=lambda rank: -budgets[rank].tokens)
    had = list(head_start) or [0.0] * len(shares)
    known: dict[tuple[BudgetCosts, int], npt.NDArray[np.float64]] = {}

    def ends_in(time: float) -> list[int]:
        """Where the samples of each rank end, in the order of `ranks`, if none may take longer than this."""
        ends, start = [], 0
        for rank in ranks:
            if start < len(ordered):
                if (budgets[rank], start) not in known:
                    known[budgets[rank], start] = costs_of_longest(ordered[start:], budgets[rank])
                costs = known[budgets[rank], start]
                most = time * shares[rank] - had[rank]
                start += max(0, int(np.searchsorted(costs, most, side="right")) - 1)
            ends.append(start)
        return ends

    low = 0.0
    alone = [(had[r] + costs_of_longest(ordered, budgets[r])[-1]) / shares[r] for r in ranks]
    high = max(min(alone), *(own / share for own, share in zip(had, shares, strict=True))) * (1 + 1e-9)
    best = ends_in(high)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        ends = ends_in(middle)
        if ends[-1] == len(ordered):
            best, high = ends, middle
        else:
            low = middle
    taken: list[list[int]] = [[] for _ in shares]
    for rank, start, end in zip(ranks, [0, *best], best, strict=False):
        taken[rank] = order[start:end].tolist()
    return taken


def partition(
    lengths: Lengths, shares: Sequence[float], *, by_length: bool = True, head_start: Sequence[float] = ()
) -> list[list[int]]:
    """As `partition_by_length`, but counts only the samples' tokens: for rows without padding, and where
    nothing but the number or the size of micro-batches is given.

    The longest sample goes first to the rank that would finish it earliest (Graham 1969, LPT; for machines
    of different speed Gonzalez et al. 1977).

    Args:
        lengths: tokens of each sample of the window.
        shares: each rank's speed, relative to the others.
        by_length: longest first; false keeps the order given.
        head_start: tokens that each rank already has; none if empty.
    """
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
    taken: list[list[int]] = [[] for _ in shares]
    loads = list(head_start) or [0.0] * len(shares)
    for position in order.tolist():
        tokens = float(lengths[position])
        rank = min(range(len(shares)), key=lambda rank: (loads[rank] + tokens) / shares[rank])
        loads[rank] += tokens
        taken[rank].append(position)
    return taken
