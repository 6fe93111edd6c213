"""A profile from traces: the tape of a shallow model, unrolled to its depth, at a few micro-batches."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.schemas.profile import KINDS, Curve, Line, Part, Profile, Recipe, Stretch
from workers.profiling.allocator import replay
from workers.profiling.simulate import Depth, Simulation, depth_for, layers_in, period_of
from workers.profiling.tape import Peak, Tape, peaks
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


def make_profile(config: dict[str, Any], recipe: Recipe, sequence: int) -> Profile:
    """Simulates a model's training step.

    Args:
        config: the content of a config.json.
        sequence: tokens of each row.
    """
    *_, checked = profiles(config, recipe, sequence)
    return checked


def profiles(config: dict[str, Any], recipe: Recipe, sequence: int) -> Iterator[Profile]:
    """The same twice: as soon as it can be used, and once it was checked."""
    began = time.perf_counter()
    knots, simulation, traces = _traces(config, recipe, sequence)
    last = knots.rows[-1]
    curve = Curve(
        sequence=sequence,
        stretches=tuple(_stretch(traces, *pair) for pair in knots.pairs),
        reserved=((last, _over_allocated(traces[last])),),
        parameters=simulation.parameters,
        trainable=simulation.trainable,
    )
    seconds = time.perf_counter() - began
    profile = Profile(source="simulated", curve=curve, checked_rows=None, check_error=None, seconds=seconds)
    yield profile
    yield _checked(profile, traces[last], last, simulation.whole(knots.checked, sequence), knots.checked)


def _checked(profile: Profile, tape: Tape, rows: int, further: Tape, checked: int) -> Profile:
    """The profile held against one more trace, and bent where it is off."""
    curve = profile.curve
    true = max(peak.bytes for peak in peaks(further))
    error = max(line.bytes(checked) for line in curve.stretches[-1].accumulating) / true - 1
    stretches = curve.stretches
    if abs(error) > BENDS_AT:
        stretches = (*stretches, _stretch({rows: tape, checked: further}, rows, checked))
    reserved = (*curve.reserved, (checked, _over_allocated(further)))
    curve = curve.model_copy(update={"stretches": stretches, "reserved": reserved})
    return profile.model_copy(update={"curve": curve, "checked_rows": checked, "check_error": error})


def _traces(
    config: dict[str, Any], recipe: Recipe, sequence: int
) -> tuple[Knots, Simulation, dict[int, Tape]]:
    """A model under fake tensors, and its tapes by rows; of all its layers where a few do not tell."""
    layers = layers_in(config)
    simulation = Simulation(config, recipe, depth_for(layers, period_of(config)))
    knots = knots_for(simulation.chunk, sequence)
    try:
        return knots, simulation, {rows: simulation.whole(rows, sequence) for rows in knots.rows}
    except NotUniform:
        simulation = Simulation(config, recipe, Depth(layers, layers, 0))
        return knots, simulation, {rows: simulation.whole(rows, sequence) for rows in knots.rows}


def _stretch(traces: dict[int, Tape], fewer: int, more: int) -> Stretch:
    """The lines through two traces."""
    pairs = list(_paired(peaks(traces[fewer]), peaks(traces[more])))
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


def _over_allocated(tape: Tape) -> float:
    allocator = replay(tape)
    return allocator.peak_reserved / allocator.peak_allocated
