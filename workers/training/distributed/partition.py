"""Divides a window's samples among ranks, so that all of them finish at about the same time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.training.micro_batches.batches import BudgetCosts, Lengths, costs_of_longest

_PRECISION = 0.004
"""The time of a window is found to this relative precision, unless single samples are coarser."""

_STEP = 1.1
"""The factor by which the guess of a window's time is raised until all samples can be taken."""

_FEW = 64
"""Of windows with at most this many samples, several orders of the ranks are tried; in larger ones, the order
makes a difference of a few percent at most."""


def partition_by_length(
    lengths: Lengths,
    shares: Sequence[float],
    budgets: Sequence[BudgetCosts],
    *,
    initial_loads: Sequence[float] = (),
) -> list[list[int]]:
    """The positions in the window that each rank takes, each position exactly once.

    Each rank takes samples of similar length, which can be cut with little padding: the rank with the largest
    token budget takes the longest samples, and so on, unless another order is faster for a window of few
    samples. A rank's time is predicted from the cost of its micro-batches. The window's time, which is
    that of its slowest rank, is found by bisection: if each rank takes as many samples as it can finish in
    that time, all samples must be taken. The result depends on nothing but the arguments.

    Args:
        lengths: tokens of each sample of the window.
        shares: each rank's speed, relative to the others; above 0.
        budgets: each rank's token budget, and what micro-batches cost within it.
        initial_loads: the cost of what each rank already has, in tokens; none if empty.
    """
    order = np.argsort(-lengths, kind="stable")
    window = _Window(lengths[order], shares, budgets, list(initial_loads) or [0.0] * len(shares))
    _, ranks, ends = min(
        map(window.divide, _orders(shares, budgets, len(lengths))), key=lambda found: found[0]
    )
    taken: list[list[int]] = [[] for _ in shares]
    for rank, start, end in zip(ranks, [0, *ends], ends, strict=False):
        taken[rank] = order[start:end].tolist()
    return taken


def _orders(shares: Sequence[float], budgets: Sequence[BudgetCosts], samples: int) -> list[list[int]]:
    """The orders in which ranks may take samples, longest first: by budget, and others for few samples."""
    ranks = range(len(shares))
    found = [sorted(ranks, key=lambda rank: (-budgets[rank].tokens, -shares[rank]))]
    if samples <= _FEW:
        found.append(sorted(ranks, key=lambda rank: (-budgets[rank].tokens, shares[rank])))
        found.append(sorted(ranks, key=lambda rank: (-shares[rank], -budgets[rank].tokens)))
    return [order for place, order in enumerate(found) if order not in found[:place]]


@dataclass(frozen=True)
class _Window:
    """A window to be divided."""

    ordered: Lengths
    """The samples' lengths, longest first."""
    shares: Sequence[float]
    budgets: Sequence[BudgetCosts]
    had: Sequence[float]
    """What each rank has already, in tokens."""

    def divide(self, ranks: Sequence[int]) -> tuple[float, Sequence[int], list[int]]:
        """The shortest time in which the ranks can train the window, if they take its samples in this order;
        the order; and where the samples of each of them end."""
        alone = {budget: float(costs_of_longest(self.ordered, budget)[-1]) for budget in set(self.budgets)}
        together = sum(self.shares)
        start = sum(self.had)
        low = max(
            (float(self.ordered.sum()) + start) / together,
            *(had / share for had, share in zip(self.had, self.shares, strict=True)),
        )
        most = max(low, min((self.had[r] + alone[self.budgets[r]]) / self.shares[r] for r in ranks))
        most *= 1 + 1e-9
        high = min(most, max(low, (min(alone.values()) + start) / together))
        ends = self._ends(high, ranks)
        while ends[-1] < len(self.ordered) and high < most:
            low, high = high, min(most, high * _STEP)
            ends = self._ends(high, ranks)
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            found = self._ends(middle, ranks)
            if found[-1] == len(self.ordered):
                ends, high = found, middle
            else:
                low = middle
        return high, ranks, ends

    def _ends(self, time: float, ranks: Sequence[int]) -> list[int]:
        """Where the samples of each rank end, if none may take longer than this."""
        ends, start = [], 0
        for rank in ranks:
            at_most = time * self.shares[rank] - self.had[rank]
            if start < len(self.ordered) and at_most > 0.0:
                start += len(costs_of_longest(self.ordered[start:], self.budgets[rank], at_most)) - 1
            ends.append(start)
        return ends


def partition(
    lengths: Lengths, shares: Sequence[float], *, by_length: bool = True, initial_loads: Sequence[float] = ()
) -> list[list[int]]:
    """As `partition_by_length`, but counts only the samples' tokens: for rows without padding, and where
    nothing but the number or the size of micro-batches is given.

    The longest sample goes first to the rank that would finish it earliest (Graham 1969, LPT; for machines
    of different speed Gonzalez et al. 1977).

    Args:
        lengths: tokens of each sample of the window.
        shares: each rank's speed, relative to the others.
        by_length: longest first; false keeps the order given.
        initial_loads: tokens that each rank already has; none if empty.
    """
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
    taken: list[list[int]] = [[] for _ in shares]
    loads = list(initial_loads) or [0.0] * len(shares)
    for position in order.tolist():
        tokens = float(lengths[position])
        rank = min(range(len(shares)), key=lambda rank: (loads[rank] + tokens) / shares[rank])
        loads[rank] += tokens
        taken[rank].append(position)
    return taken
