"""Divides samples into windows, and windows into micro-batches. Pure functions.

The windows depend only on the data, the seed and the effective batch. The plan determines how a window is
cut, which never changes its gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget

_FIXED_COST = 0.25
"""The fixed cost of a micro-batch, as a share of the planned token budget. Measured on a CPU
(tests/benchmarks) at 512 tokens: as long as 160 tokens (33 ms at 5,000 tokens/s) for a model of 4 million
parameters, and as long as 60 tokens for a model of 30 million."""

_MOST_FIXED_COST = 1024.0
"""The largest fixed cost that is assumed, in tokens. A budget that is as large as a GPU's memory allows says
nothing about the time that it takes to start a micro-batch's kernels."""

Lengths = npt.NDArray[np.int64]
Groups = list[list[int]]


@dataclass(frozen=True)
class Cursor:
    """Position in the data: samples consumed of an epoch's order."""

    epoch: int
    consumed: int


@dataclass(frozen=True)
class Scoring:
    """How a micro-batch's targets make up the log-probabilities that a preference objective compares.

    A sequence's targets are one part. With prompts that count, too (ORPO), the targets in the prompt of each
    pair's chosen sequence are one more part, after those of all sequences.
    """

    sequences: int
    """The sequences of the micro-batch; those of a pair are neighbours, the chosen one first."""
    part_of_target: Tensor
    """The part that each target belongs to; int64 of shape (targets,)."""
    counted: Tensor
    """Targets of each sequence's own part, at least 1; fp64 of shape (sequences,)."""
    reference: Tensor
    """Each sequence's log-probability by the model that the job starts from; fp64 of shape (sequences,)."""
    weights: Tensor
    """How much each sample counts, 0 if it has no targets; fp64 of shape (samples,)."""
    desirable: Tensor | None = None
    """Whether each completion is desirable, bool of shape (samples,); None for pairs."""
    parts: int = 0
    """The number of parts."""

    def to(self, device: torch.device) -> "Scoring":
        return _moved(self, device)


@dataclass(frozen=True)
class MicroBatch:
    """Samples for one forward pass: rows padded on the right, or all in one row (packed).

    With causal attention, no token attends to the padding on its right, so no attention mask is
    needed. In a packed row each sample's positions begin at 0, which is how transformers tells them apart.
    Flat positions are row × sequence + column.
    """

    input_ids: Tensor
    """int64 of shape (rows, sequence)."""
    target_positions: Tensor
    """Flat positions whose next token counts for the loss; int64 of shape (targets,)."""
    targets: Tensor
    """The next token at each position that has a target; int64 of shape (targets,)."""
    lengths: tuple[int, ...]
    """Tokens of each sample, on the host."""
    weights: Tensor | None = None
    """How much each target counts, fp32 of shape (targets,); None if all are 1."""
    position_ids: Tensor | None = None
    """int64 of shape (1, sequence), of a packed row of several samples."""
    token_positions: Tensor | None = None
    """Flat positions of all tokens that are not padding; int64 of shape (tokens,)."""
    sample_of_token: Tensor | None = None
    """The sample, counted from 0, that each real token belongs to; int64 of shape (tokens,)."""
    target_counts: tuple[int, ...] = ()
    """Targets of each sequence, on the host."""
    scoring: Scoring | None = None
    """None: the loss is a sum over targets."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Starts the copy to the device; on a GPU, the copy is asynchronous."""
        moved = _moved(self, device)
        return moved if self.scoring is None else replace(moved, scoring=self.scoring.to(device))


Movable = TypeVar("Movable", MicroBatch, Scoring)


def _moved(batch: Movable, device: torch.device) -> Movable:
    """The same with its tensors on a device."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        name: value.pin_memory().to(device, non_blocking=True)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **moved)


@dataclass(frozen=True)
class BatchLayout:
    """How samples are laid out in a micro-batch."""

    pad_id: int
    packed: bool = False
    routed: bool = False
    """For a mixture of experts: also record which tokens are real, and which sample they belong to."""
    buckets: "Buckets | None" = None
    """Rows and lengths are rounded up to a few shapes, for a compiled model."""
    separate_above: int | None = None
    """Samples with more tokens than this never share a micro-batch with shorter ones: the model computes
    them in another way. None: it computes all in the same way."""


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the samples in an epoch: a permutation determined by the seed and the epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


def window_at(cursor: Cursor, order: npt.NDArray[np.int64], effective_batch: int) -> npt.NDArray[np.int64]:
    """The samples of the window at the cursor; at the end of an epoch, those that are left."""
    return order[cursor.consumed : cursor.consumed + effective_batch]


def after(cursor: Cursor, window: int, samples: int) -> Cursor:
    """The cursor after a window of `window` samples."""
    consumed = cursor.consumed + window
    return Cursor(cursor.epoch + 1, 0) if consumed >= samples else Cursor(cursor.epoch, consumed)


def cut_window(
    lengths: Sequence[int] | Lengths,
    cut: MicroBatchRule,
    *,
    by_length: bool = True,
    packed: bool = False,
    rows: int | None = None,
    separate_above: int | None = None,
    first: np.random.Generator | None = None,
    fixed: float | None = None,
) -> Groups:
    """Micro-batches as groups of positions in the window, each position exactly once.

    Args:
        lengths: tokens of each sample of the window.
        cut: a token budget, a number of micro-batches, or a size; all are upper bounds on memory.
        by_length: order by length, longest first, so that little is padded; false keeps the order given.
        packed: a micro-batch's tokens are the sum of its lengths, instead of rows × longest.
        rows: the maximum number of samples per micro-batch under a token budget.
        separate_above: see `BatchLayout.separate_above`. A window with samples of both kinds has at least two
            micro-batches.
        first: draws the first micro-batch at random, before the rest is ordered; None draws nothing.
        fixed: the fixed cost of a micro-batch under a token budget, in tokens; None: `fixed_cost`.
    """
    array = np.asarray(lengths, dtype=np.int64)
    if not len(array):
        return []
    if separate_above is not None and needs_parting(array, separate_above):
        assert first is None, "a random first micro-batch would have samples of both kinds"
        return _cut_apart(array, array > separate_above, cut, by_length, packed, rows, fixed)
    positions = np.arange(len(array))
    head: Groups = []
    if first is not None:
        drawn = draw_first(array, cut, packed, rows, first)
        if len(drawn) == len(array):
            return [drawn]
        head = [drawn]
        positions = np.setdiff1d(positions, drawn)
        cut = without_first(cut)
    if by_length:
        positions = positions[np.argsort(-array[positions], kind="stable")]
    ordered = array[positions]
    match cut:
        case TokenBudget(tokens=tokens):
            if by_length and not packed:
                bounds = _cheapest(ordered, tokens, rows, fixed_cost(tokens) if fixed is None else fixed)
            else:
                bounds = _by_budget(ordered, tokens, packed, rows)
        case FixedCount(micro_batches=count):
            bounds = _by_count(ordered, count, packed) if by_length else _evenly(len(ordered), count)
        case FixedSize(samples=rows):
            bounds = _evenly(len(ordered), ceil(len(ordered) / rows))
    return head + [positions[start:stop].tolist() for start, stop in bounds]


def needs_parting(lengths: Lengths, separate_above: int) -> bool:
    """Whether some samples must not share a micro-batch with the others (`BatchLayout.separate_above`)."""
    return bool(lengths.min() <= separate_above < lengths.max())


def _cut_apart(
    lengths: Lengths, is_long: npt.NDArray[np.bool_], cut: MicroBatchRule, by_length: bool, packed: bool,
    rows: int | None, fixed: float | None,
) -> Groups:  # fmt: skip
    """Cuts the long samples and the others of a window separately. A number of micro-batches is divided by
    tokens, each part getting at least one."""
    parts = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    rules = [cut, cut]
    if isinstance(cut, FixedCount):
        share = lengths[is_long].sum() / lengths.sum()
        most, least = int(is_long.sum()), cut.micro_batches - int((~is_long).sum())
        own = min(max(1, round(cut.micro_batches * share), least), max(1, cut.micro_batches - 1), most)
        counts = (own, max(1, cut.micro_batches - own))
        rules = [FixedCount(micro_batches=count) for count in counts]
    return [
        part[group].tolist()
        for part, rule in zip(parts, rules, strict=True)
        for group in cut_window(
            lengths[part], rule, by_length=by_length, packed=packed, rows=rows, fixed=fixed
        )
    ]


def without_first(cut: MicroBatchRule) -> MicroBatchRule:
    """How the rest of a window is cut, after its first micro-batch."""
    return FixedCount(micro_batches=cut.micro_batches - 1) if isinstance(cut, FixedCount) else cut


def draw_first(
    lengths: Lengths, cut: MicroBatchRule, packed: bool, most: int | None, random: np.random.Generator
) -> list[int]:
    """A first micro-batch drawn at random, within the cut; the whole window, if it fits."""
    order = random.permutation(len(lengths))
    match cut:
        case TokenBudget(tokens=tokens):
            start, stop = _by_budget(lengths[order], tokens, packed, most)[0]
            rows = stop - start
        case FixedCount(micro_batches=count):
            rows = ceil(len(order) / count)
        case FixedSize(samples=size):
            rows = size
    drawn: list[int] = order[:rows].tolist()
    return drawn


def _cheapest(ordered: Lengths, tokens: int, rows_at_most: int | None, fixed: float) -> list[tuple[int, int]]:
    """The cheapest cut within the budget of samples in descending length. Its cost is the padded tokens plus
    a fixed cost of each micro-batch, since a device needs time for even the smallest one. Among the cheapest,
    it is the one whose largest micro-batch has the fewest tokens, larger ones first: 43 samples of the same
    length, of which 42 fit, become 22 and 21, as the plan shows them.

    By dynamic programming from the shortest sample backwards: best[i] is the cost of cutting all from i on,
    and largest[i] the tokens of the largest micro-batch of that cut.
    """
    count = len(ordered)
    best, ends = np.zeros(count + 1), np.zeros(count, dtype=np.int64)
    largest = np.zeros(count + 1, dtype=np.int64)
    rows = np.arange(1, count + 1)
    for i in range(count - 1, -1, -1):
        most = min(count - i, max(1, tokens // int(ordered[i])), rows_at_most or count)
        taken = ordered[i] * rows[:most]
        costs = taken + best[i + 1 : i + most + 1]
        cheapest = np.flatnonzero(costs == costs.min())
        peaks = np.maximum(taken[cheapest], largest[i + 1 + cheapest])
        chosen = int(np.flatnonzero(peaks == peaks.min())[-1])
        best[i], ends[i] = costs[cheapest[chosen]] + fixed, i + int(cheapest[chosen]) + 1
        largest[i] = peaks[chosen]
    bounds, start = [], 0
    while start < count:
        bounds.append((start, int(ends[start])))
        start = bounds[-1][1]
    return bounds


def fixed_cost(tokens: int) -> float:
    """What a micro-batch costs besides its tokens, in tokens, if the planned token budget is `tokens`."""
    return min(tokens * _FIXED_COST, _MOST_FIXED_COST)


@dataclass(frozen=True)
class BudgetCosts:
    """A token budget, and what its micro-batches cost."""

    tokens: int
    fixed: float
    """The cost of a micro-batch besides its tokens, in tokens."""

    def of(self, lengths: Lengths, groups: Groups) -> float:
        """The cost of micro-batches, in tokens, padding included."""
        return sum(tokens_of(lengths[group]) + self.fixed for group in groups)


def costs_of_longest(
    ordered: Lengths, budget: BudgetCosts, at_most: float = np.inf
) -> npt.NDArray[np.float64]:
    """What the first samples cost if they are cut as `_cheapest` does: of shape (samples + 1,), for the first
    0, 1, 2 … samples. Never falls.

    Args:
        ordered: lengths in descending order.
        at_most: higher costs are left out, so that fewer costs are returned.
    """
    count = len(ordered)
    costs = np.full(count + 1, np.inf)
    costs[0] = 0.0
    rows = np.arange(1, count + 1)
    for start, longest in enumerate(ordered.tolist()):
        if costs[start] > at_most:
            return costs[:start]
        most = min(count - start, max(1, budget.tokens // longest))
        ends = costs[start + 1 : start + most + 1]
        np.minimum(ends, costs[start] + longest * rows[:most] + budget.fixed, out=ends)
    return costs if costs[-1] <= at_most else costs[:-1]


def _by_budget(ordered: Lengths, tokens: int, packed: bool, rows: int | None = None) -> list[tuple[int, int]]:
    """Fills micro-batches with as many samples as the budget allows, at least one."""
    bounds, start, longest, total = [], 0, 0, 0
    for position, length in enumerate(ordered.tolist()):
        longest, total = max(longest, length), total + length
        taken = total if packed else longest * (position - start + 1)
        if position > start and (taken > tokens or position - start == rows):
            bounds.append((start, position))
            start, longest, total = position, length, length
    return [*bounds, (start, len(ordered))] if len(ordered) else []


def _by_count(ordered: Lengths, count: int, packed: bool) -> list[tuple[int, int]]:
    """Exactly min(count, samples) groups, the largest of them with as few tokens as possible."""
    count = min(count, len(ordered))
    low, high = int(ordered.max()), int(ordered.max()) * len(ordered)
    while low < high:
        middle = (low + high) // 2
        if len(_by_budget(ordered, middle, packed)) <= count:
            high = middle
        else:
            low = middle + 1
    bounds = _by_budget(ordered, low, packed)
    while len(bounds) < count:
        widest = max(
            (i for i, (start, stop) in enumerate(bounds) if stop - start > 1),
            key=lambda i: tokens_of(ordered[slice(*bounds[i])], packed),
        )
        start, stop = bounds[widest]
        middle = (start + stop) // 2
        bounds[widest : widest + 1] = [(start, middle), (middle, stop)]
    return bounds


def tokens_of(lengths: Lengths, packed: bool = False) -> int:
    """Tokens that a device works on for a micro-batch of these lengths, padding included."""
    return int(lengths.sum()) if packed else int(lengths.max()) * len(lengths)


def _evenly(rows: int, count: int) -> list[tuple[int, int]]:
    """Groups whose sizes differ by at most one, larger ones first."""
    count = min(count, rows)
    small, larger = divmod(rows, count)
    edges = np.cumsum([0] + [small + 1] * larger + [small] * (count - larger)).tolist()
    return list(pairwise(edges))


Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""A sample's tokens, and which of them count."""


def collate(rows: Sequence[Row], layout: BatchLayout, weights: Sequence[float] | None = None) -> MicroBatch:
    """Lays samples into a micro-batch.

    Args:
        rows: each sample's tokens, and which of these count for the loss.
        weights: how much each sample's tokens count; None if all count the same.
    """
    lengths = np.array([len(tokens) for tokens, _ in rows])
    if layout.packed:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        shape = (1, int(lengths.sum()))
    else:
        shape = layout.buckets.shape(lengths) if layout.buckets else (len(rows), int(lengths.max()))
        starts = np.arange(len(rows)) * shape[1]
    input_ids = np.full(shape[0] * shape[1], layout.pad_id, dtype=np.int64)
    for start, (tokens, _) in zip(starts, rows, strict=True):
        input_ids[start : start + len(tokens)] = tokens
    # Position t predicts token t + 1: the first token of a sample is never a target.
    own = [np.flatnonzero(counts[1:]) for _, counts in rows]
    target_positions = np.concatenate([start + at for start, at in zip(starts, own, strict=True)])
    targets = np.concatenate([tokens[at + 1] for (tokens, _), at in zip(rows, own, strict=True)])
    uneven = weights is not None and any(weight != 1.0 for weight in weights)
    token_positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).view(*shape),
        target_positions=torch.from_numpy(target_positions),
        targets=torch.from_numpy(targets.astype(np.int64)),
        lengths=tuple(lengths.tolist()),
        target_counts=tuple(len(at) for at in own),
        weights=torch.from_numpy(np.repeat(np.asarray(weights, np.float32), [len(at) for at in own]))
        if uneven
        else None,
        position_ids=_positions(lengths) if layout.packed and len(rows) > 1 else None,
        token_positions=torch.from_numpy(token_positions) if layout.routed else None,
        sample_of_token=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)) if layout.routed else None,
    )


def _positions(lengths: Lengths) -> Tensor:
    """The position of each token in its sample, for a packed row."""
    return torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).unsqueeze(0)


@dataclass(frozen=True)
class Buckets:
    """The few shapes that a compiled model sees.

    Lengths are rounded up to eighths of a power of two, but not beyond `longest`. The number of rows is
    rounded up to a power of two if the micro-batch then has at most `tokens` tokens.
    """

    tokens: int
    longest: int
    separate_above: int | None = None
    """See `BatchLayout.separate_above`: shorter samples are not rounded up beyond it."""

    def length(self, lengths: Lengths) -> Lengths:
        """Each length, rounded up."""
        steps = 2 ** (np.log2(np.maximum(lengths, 64)).astype(np.int64) - 3)
        rounded: Lengths = np.minimum(-(-lengths // steps) * steps, self.longest)
        if self.separate_above is not None:
            rounded = np.where(
                lengths <= self.separate_above, np.minimum(rounded, self.separate_above), rounded
            )
        return rounded

    def shape(self, lengths: Lengths) -> tuple[int, int]:
        """Rows and length that hold the samples."""
        length = int(self.length(lengths).max())
        power = 2 ** (len(lengths) - 1).bit_length()
        return (power if power * length <= self.tokens else len(lengths)), length
