"""Computes how each block of a trace grows with the micro-batch, from two traces that differ in nothing else.

A tensor's size is a product of lengths. So a block's size is constant, or proportional to the rows, to their
square (a packed row's mask) or to the positions of a chunk of the loss; the block's two sizes determine
which. This gives the memory of every point of the step at every micro-batch, and the peak is the highest
point. Peaks themselves are not interpolated, since they may lie at different points.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from app.contract.memory_profile import KINDS, Part, PointMemory
from workers.profiling.allocation_trace import AllocationTrace, Block, Run

Numbers = npt.NDArray[np.float64]
TERMS = 5
"""The number of terms that a block may grow with: 1, rows, rows², positions of the first and second chunk."""


class DifferentTraces(Exception):
    """The two traces make different allocations."""


@dataclass(frozen=True)
class TracedSize:
    """A trace, and the micro-batch that it was made at."""

    trace: AllocationTrace
    rows: int
    first: int
    second: int

    @property
    def terms(self) -> tuple[int, ...]:
        return 1, self.rows, self.rows**2, self.first, self.second


@dataclass(frozen=True)
class Range:
    """Micro-batches of at least `rows` rows; `first` and `second` are the positions in the two chunks of the
    loss, as (fixed positions, positions per row)."""

    rows: float
    first: tuple[float, float] = (0.0, 0.0)
    second: tuple[float, float] = (0.0, 0.0)

    def at(self, rows: float) -> Numbers:
        """The terms of a micro-batch."""
        first, second = (each + per_row * rows for each, per_row in (self.first, self.second))
        return np.array([1.0, rows, rows**2, first, second])

    def in_rows(self, terms: Numbers) -> Numbers:
        """Coefficients of 1, rows and rows², from those of the terms (in the last axis)."""
        chunks = terms[..., 3:]
        fixed, each = (np.array(pair) for pair in zip(self.first, self.second, strict=True))
        found = terms[..., :3].copy()
        found[..., 0] += chunks @ fixed
        found[..., 1] += chunks @ each
        return found


Growths = dict[int, Numbers]
"""The coefficients of a block's terms, by block id."""


def growths(one: TracedSize, other: TracedSize) -> Growths:
    """How each block of the first trace grows.

    Raises:
        DifferentTraces: the traces make different allocations, or in a different order.
    """
    if not _same_allocations(one.trace, other.trace):
        raise DifferentTraces("the step makes different allocations at different micro-batches")
    return {
        id(block): _growth(block.size, twin.size, one, other)
        for block, twin in zip(one.trace.blocks, other.trace.blocks, strict=True)
    }


def _same_allocations(one: AllocationTrace, other: AllocationTrace) -> bool:
    def summary(trace: AllocationTrace) -> Any:
        return [(run.place, _steps(run)) for run in trace.runs], [block.kind for block in trace.blocks]

    return bool(summary(one) == summary(other))


def _steps(run: Run) -> list[list[int]]:
    """Groups consecutive allocations, and consecutive frees: autocast drops its weight copies in no fixed
    order."""
    return [sorted(event.block for event in own) for _, own in groupby(run.events, itemgetter(1))]


def _growth(size: int, twin: int, one: TracedSize, other: TracedSize) -> Numbers:
    """The single term that fits both sizes, if there is one; otherwise a line through the two sizes."""
    found = np.zeros(TERMS)
    for term, (at, at_other) in enumerate(zip(one.terms, other.terms, strict=True)):
        if at and size * at_other == twin * at:
            found[term] = size / at
            return found
    found[1] = (twin - size) / (other.rows - one.rows)
    found[0] = size - found[1] * one.rows
    return found


@dataclass(frozen=True)
class PeakCandidates:
    """The points of a step that may be its peak: each after an allocation and before something is freed."""

    runs: Sequence[Run]
    growth: Numbers
    """For each event, the coefficients of what is allocated or freed."""
    kind: npt.NDArray[np.int64]
    """For each event, the number of the block's kind."""
    run: npt.NDArray[np.int64]
    """For each event, the number of its run."""
    points: npt.NDArray[np.int64]
    """Events after which the step may be at its highest."""
    live: Numbers
    """For each point, the coefficients of all live memory."""

    def highest(self, within: Range, rows: Iterable[float], *, once: bool) -> tuple[PointMemory, ...]:
        """The points that are the highest for at least one of these numbers of rows.

        Args:
            once: whether the window has only one micro-batch.
        """
        allowed = np.array([not (once and run.place.phase.endswith(" 1")) for run in self.runs])
        chosen = np.flatnonzero(allowed[self.run[self.points]])
        in_rows = within.in_rows(self.live[chosen])
        tops = {int((in_rows @ within.at(each)[:3]).argmax()) for each in rows}
        return tuple(self._line(int(self.points[chosen[top]]), within) for top in sorted(tops))

    def _line(self, event: int, within: Range) -> PointMemory:
        live = np.zeros((len(KINDS), TERMS))
        np.add.at(live, self.kind[: event + 1], self.growth[: event + 1])
        base, slope, square = within.in_rows(live).T.tolist()
        part: Part = (
            "optimizer" if self.runs[self.run[event]].place.phase == "close" else "forward and backward"
        )
        squares = {kind: each for kind, each in zip(KINDS, square, strict=True) if each}
        return PointMemory(
            part=part,
            base=dict(zip(KINDS, base, strict=True)),
            slope=dict(zip(KINDS, slope, strict=True)),
            square=squares,
        )


def peak_candidates(trace: AllocationTrace, known: Growths) -> PeakCandidates:
    """The points of a trace that may be its peak; `known` is how each of its blocks grows."""
    events = list(trace.events())
    blocks = [trace.blocks[event.block] for event in events]
    signs = np.array([1.0 if event.allocates else -1.0 for event in events])
    growth = np.array([known[id(block)] for block in blocks]) * signs[:, None]
    points = np.flatnonzero((signs > 0) & np.append(signs[1:] < 0, True))
    numbers = {kind: number for number, kind in enumerate(KINDS)}
    return PeakCandidates(
        runs=trace.runs,
        growth=growth,
        kind=np.array([numbers[block.kind] for block in blocks]),
        run=np.repeat(np.arange(len(trace.runs)), [len(run.events) for run in trace.runs]),
        points=points,
        live=np.cumsum(growth, axis=0)[points],
    )


def trace_at(trace: AllocationTrace, known: Growths, within: Range, rows: float) -> AllocationTrace:
    """The trace at a given number of rows."""
    terms = within.at(rows)
    sizes = {number: round(float(growth @ terms)) for number, growth in known.items()}
    made: dict[int, Block] = {}
    for block in trace.blocks:
        if id(block) not in made:
            made[id(block)] = replace(block, size=sizes[id(block)])
    return AllocationTrace([made[id(block)] for block in trace.blocks], trace.runs)
