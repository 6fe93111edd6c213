"""Groups the samples of a packed row by length, for an operator that takes equally long rows.

Everything else in a model computes a packed row's tokens without padding. Only attention needs each sample in
a row of its own: samples of similar length are padded to the longest of them. The padding follows a sample's
tokens, so that causal attention never looks at it, and its gradient is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.training.micro_batches.batches import Lengths

_COST_OF_GROUP = 500.0
"""What a group's own call costs, in tokens of padding."""


@dataclass(frozen=True)
class HeadRows:
    """Where the states of each token and head are, in a packed row and in the padded samples."""

    sources: Tensor
    """For each vector of the padded states, the row of the packed states, seen as a matrix of shape
    (tokens × heads, width), from which it is copied. Positions that are padding repeat the sample's last
    token. int64."""
    places: Tensor
    """The index of each vector of the packed states among the padded ones; int64 of shape
    (tokens × heads,)."""


class SampleGroups:
    """How a packed row's samples are padded in groups.

    Args:
        lengths: tokens of each sample.
    """

    def __init__(self, lengths: Lengths) -> None:
        order = np.argsort(-lengths, kind="stable")
        self._samples = [order[first:last] for first, last in _bounds(lengths[order])]
        self._lengths, self._starts = lengths, np.cumsum(lengths) - lengths
        self._rows: dict[int, HeadRows] = {}
        self.shapes = tuple((len(samples), int(lengths[samples[0]])) for samples in self._samples)
        """Of each group: its number of samples, and the tokens of the longest of them."""

    def rows(self, heads: int) -> HeadRows:
        """The rows of states with this many heads. The padded states of a group have the shape (samples,
        heads, longest, width), one group after the other."""
        if heads not in self._rows:
            self._rows[heads] = self._rows_of(heads)
        return self._rows[heads]

    def _rows_of(self, heads: int) -> HeadRows:
        head = np.arange(heads)[:, None]
        sources = []
        places = np.empty(int(self._lengths.sum()) * heads, dtype=np.int64)
        end = 0
        for samples, (_, longest) in zip(self._samples, self.shapes, strict=True):
            columns, lengths = np.arange(longest), self._lengths[samples, None]
            tokens = self._starts[samples, None] + np.minimum(columns, lengths - 1)
            rows = tokens[:, None, :] * heads + head
            is_token = np.broadcast_to((columns < lengths)[:, None, :], rows.shape)
            places[rows[is_token]] = end + np.flatnonzero(is_token)
            sources.append(rows.reshape(-1))
            end += rows.size
        return HeadRows(torch.from_numpy(np.concatenate(sources)), torch.from_numpy(places))


def groups_of(begins: Tensor) -> SampleGroups:
    """The groups of a packed row, which are determined once and kept with the tensor.

    Args:
        begins: where samples begin, and where the last one ends, int32.
    """
    known: SampleGroups | None = getattr(begins, "sample_groups", None)
    if known is None:
        known = SampleGroups(begins.diff().numpy().astype(np.int64))
        begins.sample_groups = known  # type: ignore[attr-defined]
    return known


def _bounds(ordered: Lengths) -> list[tuple[int, int]]:
    """The cheapest division into groups, as pairs of begin and end. A group costs as many tokens as its
    padded samples have, and `_COST_OF_GROUP`.

    Args:
        ordered: lengths, the longest first.
    """
    count = len(ordered)
    costs, begins = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
    costs[0] = 0.0
    for start, longest in enumerate(ordered.tolist()):
        found = costs[start] + longest * np.arange(1, count - start + 1) + _COST_OF_GROUP
        better = found < costs[start + 1 :]
        costs[start + 1 :][better], begins[start + 1 :][better] = found[better], start
    bounds, end = [], count
    while end:
        bounds.append((int(begins[end]), end))
        end = int(begins[end])
    return bounds[::-1]


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: HeadRows) -> Tensor:
        ctx.rows = rows
        return states.index_select(0, rows.sources)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0].index_select(0, ctx.rows.places), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: HeadRows) -> Tensor:
        ctx.rows = rows
        return padded.index_select(0, rows.places)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        rows: HeadRows = ctx.rows
        padded = outer[0].new_zeros(len(rows.sources), outer[0].shape[1])
        return padded.index_copy_(0, rows.places, outer[0]), None


def pad(states: Tensor, groups: SampleGroups) -> list[Tensor]:
    """The states of each group's samples, as one padded batch for each group.

    The gradient of the padding is left out: it is zero, since `unpad` leaves out what was computed there.

    Args:
        states: of shape (tokens, heads, width).

    Returns:
        For each group, of shape (samples, heads, longest, width).
    """
    heads, width = states.shape[1:]
    padded: Tensor = _Pad.apply(states.reshape(-1, width), groups.rows(heads))  # type: ignore[no-untyped-call]
    parts = padded.split([samples * heads * longest for samples, longest in groups.shapes])
    return [
        part.view(samples, heads, longest, width)
        for part, (samples, longest) in zip(parts, groups.shapes, strict=True)
    ]


def unpad(parts: Sequence[Tensor], groups: SampleGroups) -> Tensor:
    """The states of a packed row's tokens, from those of each group's samples, which are of the shapes that
    `pad` returns: of shape (tokens, heads, width)."""
    heads, width = parts[0].shape[1], parts[0].shape[3]
    padded = torch.cat([part.reshape(-1, width) for part in parts])
    states: Tensor = _Unpad.apply(padded, groups.rows(heads))  # type: ignore[no-untyped-call]
    return states.view(-1, heads, width)
