"""A profile from traces: how each block of a shallow model's trace grows, unrolled to the model's depth."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

from app.contract.memory_profile import KINDS, Curve, PointMemory, Profile, Recipe, Stretch
from workers.profiling.allocation_trace import AllocationTrace, Peak, peaks
from workers.profiling.allocator import replay
from workers.profiling.depth import Depth, depth_for, layers_in, period_of, treats_layers_differently
from workers.profiling.growth import (
    DifferentTraces,
    Growths,
    PeakCandidates,
    Range,
    TracedSize,
    growths,
    peak_candidates,
    trace_at,
)
from workers.profiling.simulate import Chunks, Simulation
from workers.profiling.unroll import NotUniform

_MAX_ROWS = 2**20
_CHECKED_ROWS = 1
"""One row alone: a tensor of a single row needs no copy to become contiguous, so the step makes other
allocations than with several rows."""

_RESERVED_ROWS = (2, 4, 8, 16, 32, 64, 128, 256)
"""Rows for which the caching allocator is simulated. Its segments grow by whole pages, so that with few rows
it holds relatively more than is allocated."""
_MIN_UNIT = 10

_SAMPLES = ((2, Chunks(768, 384)), (3, Chunks(896, 512)))
"""Two micro-batches and the chunks of their loss. Rows and chunks all grow by different ratios, so that a
block's two sizes tell what it depends on. The chunks are as long as real ones, since kernels work in tiles;
more rows do not make a trace slower."""

RunTraces = Callable[[Sequence[Callable[[], AllocationTrace]]], list[AllocationTrace]]
"""How several traces are made: one after another, or side by side."""


def make_profile(config: dict[str, Any], recipe: Recipe, sequence: int) -> Profile:
    """Simulates a model's training step.

    Args:
        config: the content of a config.json.
        sequence: tokens of each row.
    """
    *_, checked = profiles(config, recipe, sequence)
    return checked


def profiles(
    config: dict[str, Any], recipe: Recipe, sequence: int, run_traces: RunTraces | None = None
) -> Iterator[Profile]:
    """Yields the profile twice: as soon as it can be used, and after it was checked."""
    began = time.perf_counter()
    run_traces = run_traces or (lambda works: [work() for work in works])
    depth = depth_for(layers_in(config), period_of(config, sequence))
    if treats_layers_differently(recipe):
        depth = Depth(layers_in(config), layers_in(config), 0)
    try:
        simulation = Simulation(config, recipe, depth)
        ways = _retried_variants(simulation, sequence, run_traces)
    except (NotUniform, ValueError, LookupError, TypeError, AttributeError):
        if not depth.copies:
            raise
        # Layers are not alike, or the config has a field that does not fit fewer layers.
        simulation = Simulation(config, recipe, Depth(layers_in(config), layers_in(config), 0))
        ways = _retried_variants(simulation, sequence, run_traces)
    starts = [each.rows for _, each in ways]
    curve = Curve(
        sequence=sequence,
        stretches=tuple(
            _stretch(way.peak_candidates, within, end)
            for (way, within), end in zip(ways, [*starts[1:], inf], strict=True)
        ),
        reserved=_reserved(ways, recipe),
        parameters=simulation.parameters,
        trainable=simulation.trainable,
    )
    profile = Profile(
        source="simulated",
        curve=curve,
        checked_rows=None,
        check_error=None,
        seconds=time.perf_counter() - began,
    )
    yield profile
    yield _checked(profile, simulation.whole(_CHECKED_ROWS, sequence), recipe)


def _retried_variants(
    simulation: Simulation, sequence: int, together: RunTraces
) -> "list[tuple[_StepVariant, Range]]":
    """`_step_variants`, tried once more if two traces differ: autocast drops cached copies in an order
    that is not fixed."""
    try:
        return _step_variants(simulation, sequence, together)
    except DifferentTraces:
        return _step_variants(simulation, sequence, together)


class _StepVariant:
    """A variant of the step; two traces determine its memory at every micro-batch."""

    def __init__(self, simulation: Simulation, one: TracedSize, other: TracedSize) -> None:
        self.known: Growths = growths(one, other)
        self.trace = simulation.unrolled(one.trace)
        self.peak_candidates: PeakCandidates = peak_candidates(self.trace, self.known)


def _step_variants(
    simulation: Simulation, sequence: int, together: RunTraces
) -> list[tuple[_StepVariant, Range]]:
    """The variants of the step, with one, two or more chunks of the loss, and their ranges of micro-batches.

    Raises:
        NotUniform: the layers that were left out are not like those that were traced.
    """
    chunk, positions = simulation.chunk_positions, max(1, sequence - 1)
    second, third = (chunk + 1) / positions, (2 * chunk + 1) / positions
    """The numbers of rows from which there is a second chunk, and a third."""

    def traced(*requested: tuple[int, Chunks | None]) -> list[_StepVariant]:
        traces = together([partial(simulation.trace, rows, sequence, chunks) for rows, chunks in requested])
        found = [
            TracedSize(trace, rows, *((chunks.first, chunks.second) if chunks else (0, 0)))
            for trace, (rows, chunks) in zip(traces, requested, strict=True)
        ]
        return [
            _StepVariant(simulation, one, other) for one, other in zip(found[::2], found[1::2], strict=True)
        ]

    unit = max(_MIN_UNIT, -(-sum(vars(_SAMPLES[1][1]).values()) // positions))
    samples = [(unit * rows, chunks) for rows, chunks in _SAMPLES]
    if not chunk:
        (whole,) = traced(*((rows, None) for rows, _ in samples))
        return [(whole, Range(0.0))]
    if simulation.chunks_at_once:
        single = [(rows, Chunks(rows * positions)) for rows, _ in samples]
        several = chunk // positions + 2
        one, more = traced(*single, (several, Chunks(chunk)), (2 * several, Chunks(chunk)))
        return [(one, Range(0.0, (0.0, positions))), (more, Range(second, (chunk, 0.0)))]
    (way,) = traced(*samples)
    return [
        (way, Range(0.0, (0.0, positions))),
        (way, Range(second, (chunk, 0.0), (-chunk, positions))),
        (way, Range(third, (chunk, 0.0), (chunk, 0.0))),
    ]


def _stretch(known: PeakCandidates, within: Range, end: float) -> Stretch:
    """The highest points for micro-batches of the range, up to `end`."""
    rows = [each for each in _rows_to_evaluate(within.rows) if each < end]
    return Stretch(
        rows=within.rows,
        once=known.highest(within, rows, once=True),
        accumulating=known.highest(within, rows, once=False),
    )


def _rows_to_evaluate(start: float) -> Iterator[float]:
    """Numbers of rows from `start` on; each is larger than the last by one or by an eighth."""
    yield start
    rows = max(1, int(start) + 1)
    while rows < max(_MAX_ROWS, 2 * start):
        yield float(rows)
        rows += max(1, rows // 8)


def _reserved(ways: Sequence[tuple[_StepVariant, Range]], recipe: Recipe) -> tuple[tuple[int, float], ...]:
    """The ratio of reserved to allocated memory of the caching allocator, at few rows and at many."""
    if recipe.device == "cpu":
        return ((_RESERVED_ROWS[0], 1.0),)
    found = []
    most = 4 * (int(ways[-1][1].rows) + 1)
    for rows in (*_RESERVED_ROWS, *([most] if most > _RESERVED_ROWS[-1] else [])):
        way, within = next((each for each in reversed(ways) if each[1].rows <= rows), ways[0])
        trace = trace_at(way.trace, way.known, within, rows)
        found.append((rows, _reserved_ratio(trace, recipe)))
    return tuple(found)


def _reserved_ratio(trace: AllocationTrace, recipe: Recipe) -> float:
    allocator = replay(trace, expandable_segments=recipe.expandable_segments)
    return allocator.peak_reserved / allocator.peak_allocated


def _checked(profile: Profile, trace: AllocationTrace, recipe: Recipe) -> Profile:
    """Compares the profile with a trace of a single row, which gets its own stretch if the profile is off."""
    rows, curve = _CHECKED_ROWS, profile.curve
    later = [each for each in curve.stretches if each.rows > rows]
    stretch = curve.stretches[len(curve.stretches) - len(later) - 1]
    found = peaks(trace)
    several = max(found, key=lambda peak: peak.bytes)
    once = max((each for each in found if not each.place.phase.endswith(" 1")), key=lambda peak: peak.bytes)
    near = [max(lines, key=lambda line: line.bytes(rows)) for lines in (stretch.once, stretch.accumulating)]
    error = near[1].bytes(rows) / several.bytes - 1
    if near[0].bytes(rows) != once.bytes or error:
        alone = Stretch(rows=0.0, once=(_through(near[0], once),), accumulating=(_through(near[1], several),))
        more = stretch.model_copy(update={"rows": rows + 1 / curve.sequence})
        curve = curve.model_copy(update={"stretches": (alone, more, *later)})
    if recipe.device == "cuda":
        reserved = ((rows, _reserved_ratio(trace, recipe)), *curve.reserved)
        curve = curve.model_copy(update={"reserved": reserved})
    return profile.model_copy(update={"curve": curve, "checked_rows": rows, "check_error": error})


def _through(like: PointMemory, peak: Peak) -> PointMemory:
    """A line through the peak of a single row, with the slope of a nearby line for fractions of a row."""
    slope = {kind: min(max(0.0, like.slope[kind]), float(peak.by_kind[kind])) for kind in KINDS}
    base = {kind: peak.by_kind[kind] - slope[kind] for kind in KINDS}
    return PointMemory(part=like.part, base=base, slope=slope)
