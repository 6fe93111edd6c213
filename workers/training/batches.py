"""From an order of samples to windows, and from a window to micro-batches. Pure functions.

The windows depend on the data, the seed and the effective batch alone; the cut is the plan's, and
never changes a window's gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.schemas.spec import Cut, FixedCount, FixedSize, TokenBudget

IGNORED = -100
"""Target of a position that does not count for the loss."""

Lengths = npt.NDArray[np.int64]
Groups = list[list[int]]


@dataclass(frozen=True)
class Cursor:
    """Position in the data: samples consumed of an epoch's order."""

    epoch: int
    consumed: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right to the longest.

    `input_ids` and `targets` are int64 of shape (rows, sequence); `targets[r, t]` is the token that
    follows position t, or IGNORED. Causal attention keeps the padding behind every real token out of
    its sight, so no attention mask is needed.
    """

    input_ids: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        return MicroBatch(
            self.input_ids.pin_memory().to(device, non_blocking=True),
            self.targets.pin_memory().to(device, non_blocking=True),
        )


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the samples in an epoch: a permutation that seed and epoch fix."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def window_at(cursor: Cursor, order: npt.NDArray[np.int64], effective_batch: int) -> npt.NDArray[np.int64]:
    """The samples of the window at the cursor; at an epoch's end what is left of it."""
    return order[cursor.consumed : cursor.consumed + effective_batch]


def after(cursor: Cursor, window: int, samples: int) -> Cursor:
    """The cursor behind a window of that many samples."""
    consumed = cursor.consumed + window
    return Cursor(cursor.epoch + 1, 0) if consumed >= samples else Cursor(cursor.epoch, consumed)


def cut_window(lengths: Sequence[int] | Lengths, cut: Cut, *, by_length: bool = True) -> Groups:
    """Micro-batches as groups of positions in the window, each position exactly once.

    Args:
        lengths: tokens of each sample of the window.
        by_length: longest first, so that little is padded; false keeps the window's own order, for
            clipping that depends on the split and must not depend on lengths.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable") if by_length else np.arange(len(sizes))
    ordered = sizes[order]
    match cut:
        case TokenBudget(tokens=tokens):
            bounds = _by_budget(ordered, tokens)
        case FixedCount(micro_batches=count):
            bounds = _by_count(ordered, count) if by_length else _evenly(len(ordered), count)
        case FixedSize(samples=rows):
            bounds = _evenly(len(ordered), ceil(len(ordered) / rows))
    return [order[start:stop].tolist() for start, stop in bounds]


def _by_budget(ordered: Lengths, tokens: int) -> list[tuple[int, int]]:
    """As many rows as rows × longest allows, and at least one."""
    bounds, start, longest = [], 0, 0
    for position, length in enumerate(ordered.tolist()):
        longest = max(longest, length)
        if position > start and longest * (position - start + 1) > tokens:
            bounds.append((start, position))
            start, longest = position, length
    return [*bounds, (start, len(ordered))] if len(ordered) else []


def _by_count(ordered: Lengths, count: int) -> list[tuple[int, int]]:
    """Exactly min(count, rows) groups, the largest of them with as few padded tokens as possible."""
    count = min(count, len(ordered))
    low, high = int(ordered[0]), int(ordered[0]) * len(ordered)
    while low < high:
        middle = (low + high) // 2
        if len(_by_budget(ordered, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bounds = _by_budget(ordered, low)
    while len(bounds) < count:
        widest = max(
            (i for i, (start, stop) in enumerate(bounds) if stop - start > 1),
            key=lambda i: int(ordered[bounds[i][0]]) * (bounds[i][1] - bounds[i][0]),
        )
        start, stop = bounds[widest]
        middle = (start + stop) // 2
        bounds[widest : widest + 1] = [(start, middle), (middle, stop)]
    return bounds


def _evenly(rows: int, count: int) -> list[tuple[int, int]]:
    """Groups whose sizes differ by at most one, larger ones first."""
    count = min(count, rows)
    small, larger = divmod(rows, count)
    edges = np.cumsum([0] + [small + 1] * larger + [small] * (count - larger)).tolist()
    return list(pairwise(edges))


def collate(
    read: Callable[[int], tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]],
    samples: Sequence[int],
    pad_id: int,
) -> MicroBatch:
    """Reads samples (their tokens, and which of these count) and pads them to the longest."""
    rows = [read(sample) for sample in samples]
    longest = max(len(tokens) for tokens, _ in rows)
    input_ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    targets = np.full((len(rows), longest), IGNORED, dtype=np.int64)
    for row, (tokens, counts) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = np.where(counts[1:], tokens[1:], IGNORED)
    return MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(targets))
