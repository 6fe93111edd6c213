"""A profile from traces: the tape of a shallow model, unrolled to its depth, at a few micro-batches."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.schemas.profile import KINDS, Curve, Line, Part, Profile, Recipe, Stretch
from workers.profiling.allocator import replay
from workers.profiling.depth import Depth, depth_for, layers_in, period_of
from workers.profiling.simulate import Simulation
from workers.profiling.tape import Peak, peaks
from workers.profiling.unroll import NotUniform

BENDS_AT = 1e-3
"""Where the check is off by more, the curve gets a stretch of its own there."""


@dataclass(frozen=True)
class Knots:
    """Micro-batches that are traced: between each pair, and beyond the last, memory is linear in the rows."""

    pairs: tuple[tuple[int, int], ...]
    checked: int
    """One more, that the curve is checked against."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted({rows for pair in self.pairs for rows in pair}))


def knots_for(chunk: int, sequence: int) -> Knots:
    """The knots for a loss in chunks of so many positions: up to one chunk, and beyond.

    >>> knots_for(128, 1024).pairs
    ((1, 4),)
    """
    within = chunk // max(1, sequence - 1)
    if not 1 <= within <= _MOST_WITHIN:
        return Knots(((1, 4),), 16)
    beyond = within + 1
    return Knots(((1, within), (beyond, 4 * beyond)), 16 * beyond)


_MOST_WITHIN = 64
"""With a vocabulary so small that more rows than this are one chunk, the logits hardly count."""


@dataclass(frozen=True)
class Traced:
    """What is kept of a tape."""

    peaks: list[Peak]
    over_allocated: float
    """Bytes that the caching allocator reserves over bytes allocated."""


Together = Callable[[Sequence[Callable[[], Traced]]], list[Traced]]
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
    config: dict[str, Any], recipe: Recipe, sequence: int, together: Together | None = None
) -> Iterator[Profile]:
    """The same twice: as soon as it can be used, and once it was checked."""
    began = time.perf_counter()
    simulation = Simulation(config, recipe, depth_for(layers_in(config), period_of(config, sequence)))
    knots = knots_for(simulation.chunk, sequence)
    together = together or (lambda works: [work() for work in works])
    try:
        traces = _traces(simulation, knots.rows, sequence, together)
    except NotUniform:
        simulation = Simulation(config, recipe, Depth(layers_in(config), layers_in(config), 0))
        traces = _traces(simulation, knots.rows, sequence, together)
    last = knots.rows[-1]
    curve = Curve(
        sequence=sequence,
        stretches=tuple(_stretch(traces, *pair) for pair in knots.pairs),
        reserved=((last, traces[last].over_allocated),),
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
    further = _traced(simulation, knots.checked, sequence)
    yield _checked(profile, {last: traces[last], knots.checked: further})


def _checked(profile: Profile, traces: dict[int, Traced]) -> Profile:
    """The profile held against the second of two traces, and bent where it is off."""
    (last, _), (checked, further) = sorted(traces.items())
    curve, stretches = profile.curve, profile.curve.stretches
    true = max(peak.bytes for peak in further.peaks)
    error = max(line.bytes(checked) for line in stretches[-1].accumulating) / true - 1
    if abs(error) > BENDS_AT:
        stretches = (*stretches, _stretch(traces, last, checked))
    reserved = (*curve.reserved, (checked, further.over_allocated))
    curve = curve.model_copy(update={"stretches": stretches, "reserved": reserved})
    return profile.model_copy(update={"curve": curve, "checked_rows": checked, "check_error": error})


def _traces(
    simulation: Simulation, rows: Sequence[int], sequence: int, together: Together
) -> dict[int, Traced]:
    works = [partial(_traced, simulation, each, sequence) for each in rows]
    return dict(zip(rows, together(works), strict=True))


def _traced(simulation: Simulation, rows: int, sequence: int) -> Traced:
    """A trace at the whole depth.

    Raises:
        NotUniform: the layers that were left out are not like those that were traced.
    """
    tape = simulation.whole(rows, sequence)
    allocator = replay(tape, expandable_segments=simulation.recipe.expandable_segments)
    return Traced(peaks(tape), allocator.peak_reserved / allocator.peak_allocated)


def _stretch(traces: dict[int, Traced], fewer: int, more: int) -> Stretch:
    """The lines through two traces."""
    pairs = list(_paired(traces[fewer].peaks, traces[more].peaks))
    lines = [_line(one, other, fewer, more) for one, other in pairs]
    once = [line for line, (peak, _) in zip(lines, pairs, strict=True) if not peak.place.phase.endswith(" 1")]
    return Stretch(rows=fewer, once=_highest(once), accumulating=_highest(lines))


def _paired(fewer: Sequence[Peak], more: Sequence[Peak]) -> list[tuple[Peak, Peak]]:
    """The same points of two traces; where their runs differ in number, the highest at each place."""
    if [peak.place for peak in fewer] == [peak.place for peak in more]:
        return list(zip(fewer, more, strict=True))
    highest: Callable[[Sequence[Peak]], dict[Any, Peak]] = lambda found: {  # noqa: E731
        peak.place: peak for peak in sorted(found, key=lambda peak: peak.bytes)
    }
    ones, others = highest(fewer), highest(more)
    return [(ones[place], others[place]) for place in ones.keys() & others.keys()]


def _line(one: Peak, other: Peak, fewer: int, more: int) -> Line:
    slope = {kind: (other.by_kind[kind] - one.by_kind[kind]) / max(1, more - fewer) for kind in KINDS}
    base = {kind: one.by_kind[kind] - slope[kind] * fewer for kind in KINDS}
    part: Part = "optimizer" if one.place.phase == "close" else "forward and backward"
    return Line(part=part, base=base, slope=slope)


def _highest(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Those that are the highest for some number of rows, by slope."""
    steep = sorted(lines, key=lambda line: (line.bytes(1) - line.bytes(0), line.bytes(0)))
    hull: list[Line] = []
    for line in steep:
        while hull and (line.bytes(1) >= hull[-1].bytes(1) or _hidden(hull, line)):
            hull.pop()
        hull.append(line)
    return tuple(hull)


def _hidden(hull: Sequence[Line], line: Line) -> bool:
    """Whether the last line of the hull is nowhere above both its predecessor and the new one."""
    if len(hull) < 2:
        return False
    before, last = hull[-2], hull[-1]
    return _meet(before, line) <= _meet(before, last)


def _meet(flat: Line, steep: Line) -> float:
    """The rows at which a steeper line overtakes."""
    gain = (steep.bytes(1) - steep.bytes(0)) - (flat.bytes(1) - flat.bytes(0))
    return (flat.bytes(0) - steep.bytes(0)) / gain if gain else float("inf")
