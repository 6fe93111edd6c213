"""Divides a window's samples among ranks, so that all of them finish at about the same time."""

from collections.abc import Sequence

import numpy as np

from workers.training.batches import Lengths


def partition(
    lengths: Lengths, shares: Sequence[float], *, by_length: bool = True, head_start: Sequence[float] = ()
) -> list[list[int]]:
    """The positions in the window that each rank takes, each position exactly once.

    The longest sample goes first to the rank that would finish it earliest (Graham 1969, LPT; for machines
    of different speed Gonzalez et al. 1977). The result depends on nothing but the arguments.

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
