"""Tunes the token budget while training: tries other sizes of micro-batch in windows that count, and keeps
the fastest.

How a window is cut never changes its gradient, so that a trial costs nothing but the time it loses. Twice the
budget is tried first, then half, and so on from the faster one. The two sizes of a trial take turns, in an
order that treats both alike if the device slows down or if every other window differs, and the median of
their speeds' ratios decides. On a GPU, the first windows also tell what a micro-batch costs besides its
tokens, by which windows are cut from then on (fixed_cost.py). What the tuner decides depends on measured
time, so that every decision is recorded: an attempt that repeats windows cuts them as before.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import log
from statistics import median
from typing import Any

from app.contract.reports import MeasuredSize, Tuning
from workers.training.checkpoints.state import LearnedTuning, TriedSize
from workers.training.devices.stopwatch import Lap
from workers.training.micro_batches import fixed_cost

WARM_UP = 2
"""Windows before the first trial: the optimizer's states exist then, and kernels are chosen."""

TURNS = (False, True, True, False, False, True, True, False)
"""Whether each window of a trial is cut by the other size (true) or by the current one."""

WORTH_SWITCHING = 1.05
"""A size replaces the current one if it is at least this many times as fast."""

_GAIN = log(WORTH_SWITCHING)

WORTH_TRYING = 100
"""Trials begin only if at least this many windows are left, which can gain what the trials may lose."""

LARGEST_FACTOR = 4
"""No size is more than this many times the planned one."""

FIRST_TRIALS_PERIOD = 500
"""Windows until sizes are tried again, since lengths and speeds may change; each period is twice as long as
the one before."""


@dataclass(frozen=True)
class Measured:
    """One window, for the tuner."""

    samples: int
    tokens: int
    """Tokens of its samples, without padding."""
    micro_batches: int
    largest_tokens: int
    """Tokens of its largest micro-batch, padding included."""
    seconds: float
    """From the first micro-batch to the end of the last one; without the optimizer."""
    laps: tuple[Lap, ...] = ()
    """Its micro-batches, if they are measured one by one."""
    fixed: float = 0.0
    """The fixed cost of a micro-batch by which the window was cut, in tokens."""


@dataclass(frozen=True)
class Bounds:
    """Which budgets may be tried for the windows to come, in tokens."""

    planned: int
    least: int
    """A smaller budget would give micro-batches of one sample mostly."""
    most: int
    """A larger one is not expected to fit, or the whole window already fits into one micro-batch."""
    windows_left: int
    is_comparable: bool = True
    """Whether this window is like most others; an epoch's short last window is not."""


class Tuner:
    """Decides the token budget of each window.

    Args:
        learned: what was learned from earlier windows, which checkpoints keep; changed in place.
        adapts: whether anything is tried.
        recorded: the states after earlier attempts' decisions, by step.
        until: the last step that an earlier attempt has made; up to it, only recorded decisions are made.
    """

    def __init__(
        self,
        learned: LearnedTuning,
        *,
        adapts: bool,
        recorded: Mapping[int, Mapping[str, Any]] | None = None,
        until: int = 0,
    ) -> None:
        self.learned, self._adapts = learned, adapts
        self._recorded, self._until = recorded or {}, until
        self._laps: list[Lap] = []
        self._windows_with_laps = 0
        self._windows_here = 0
        """Windows in this process, whose first ones warm up, after a resume too."""

    @property
    def adapts(self) -> bool:
        """Whether anything is tried."""
        return self._adapts and not self.learned.ended

    @property
    def is_on_trial(self) -> bool:
        """Whether the next window tries another size."""
        turn = len(self.learned.speeds)
        return self.learned.trial is not None and turn < len(TURNS) and TURNS[turn]

    def next_tokens(self, planned: int) -> int:
        """The token budget of the next window."""
        return (self.learned.trial if self.is_on_trial else self.learned.tokens) or planned

    def record_window(self, step: int, window: Measured, bounds: Bounds) -> bool:
        """Takes a window into account that was cut by `next_tokens`.

        Args:
            step: optimizer steps made, including this window's.

        Returns:
            Whether a decision was made, which is to be recorded (`state`).
        """
        learned = self.learned
        learned.windows += 1
        if step <= self._until:
            if step in self._recorded:
                learned.use(self._recorded[step])
            if not self.adapts:
                self.give_up()
            return False
        if learned.trial is not None:
            if bounds.is_comparable:
                self._note(window, bounds)
            return bounds.is_comparable
        self._windows_here += 1
        if window.laps and self.adapts and learned.fixed_rounds < fixed_cost.ROUNDS:
            return self._windows_here > WARM_UP and self._measure_fixed_cost(window)
        due = learned.windows >= (learned.period or WARM_UP)
        if not (self.adapts and due and bounds.windows_left >= WORTH_TRYING):
            return False
        learned.tried, learned.before = [], learned.tokens or bounds.planned
        self._begin(bounds)
        return True

    def _measure_fixed_cost(self, window: Measured) -> bool:
        """Measures what a micro-batch costs besides its tokens, before sizes are tried. Returns whether that
        was decided."""
        learned = self.learned
        self._laps = fixed_cost.thinned([*self._laps, *window.laps])
        self._windows_with_laps += 1
        if self._windows_with_laps < fixed_cost.WINDOWS or len(self._laps) < fixed_cost.LEAST_LAPS:
            return False
        self._windows_with_laps = 0
        found = fixed_cost.fixed_cost_of(self._laps)
        if found is None or 1 / fixed_cost.SAME < found / max(window.fixed, 1.0) < fixed_cost.SAME:
            learned.fixed_rounds = fixed_cost.ROUNDS
        else:
            learned.fixed, learned.fixed_rounds = found, learned.fixed_rounds + 1
        return True

    def give_up(self) -> None:
        """Ends the trials for good: memory decides the budget from now on."""
        self.learned.end()

    def state(self) -> dict[str, Any]:
        """The learned state, for the record."""
        return asdict(self.learned)

    def result(self, planned: int) -> Tuning | None:
        """What the last trials have found; None while they go on, or if nothing could be tried."""
        learned = self.learned
        if learned.trial is not None or not learned.tried or not self.adapts:
            return None
        return Tuning(
            token_budget=learned.tokens or planned,
            samples=min(each.samples for each in learned.tried),
            tried=tuple(
                MeasuredSize(
                    token_budget=each.token_budget,
                    micro_batches=each.micro_batches,
                    largest_tokens=each.largest_tokens,
                    samples_per_second=each.samples / each.seconds,
                    tokens_per_second=each.tokens / each.seconds,
                    peak_bytes=None,
                )
                for each in sorted(learned.tried, key=lambda each: -each.token_budget)
            ),
        )

    def _note(self, window: Measured, bounds: Bounds) -> None:
        learned = self.learned
        assert learned.trial is not None
        self._add(self.next_tokens(bounds.planned), window)
        learned.speeds.append(window.tokens / max(window.seconds, 1e-9))
        if len(learned.speeds) < len(TURNS):
            return
        turns = list(zip(learned.speeds, TURNS, strict=True))
        current = [speed for speed, is_other in turns if not is_other]
        other = [speed for speed, is_other in turns if is_other]
        if median(log(theirs / ours) for ours, theirs in zip(current, other, strict=True)) >= _GAIN:
            learned.tokens = learned.trial
        self._begin(bounds)

    def _begin(self, bounds: Bounds) -> None:
        """Begins the next trial; ends them if there is none."""
        learned = self.learned
        current = learned.tokens or bounds.planned
        done = {each.token_budget for each in learned.tried}
        sizes = (2 * current, current // 2)
        most = min(bounds.most, LARGEST_FACTOR * bounds.planned)
        possible = (size for size in sizes if min(bounds.least, current) <= size <= most and size not in done)
        learned.trial = next(possible, None) if bounds.windows_left >= WORTH_TRYING else None
        learned.speeds = []
        if learned.trial is None:
            learned.windows, learned.period = 0, max(FIRST_TRIALS_PERIOD, 2 * learned.period)

    def _add(self, budget: int, window: Measured) -> None:
        """Adds a window to what is known of a size."""
        own = next((each for each in self.learned.tried if each.token_budget == budget), None)
        known = own or TriedSize(budget)
        added = replace(
            known,
            samples=known.samples + window.samples,
            tokens=known.tokens + window.tokens,
            seconds=known.seconds + max(window.seconds, 1e-9),
            micro_batches=max(known.micro_batches, window.micro_batches),
            largest_tokens=max(known.largest_tokens, window.largest_tokens),
        )
        self.learned.tried = [each for each in self.learned.tried if each is not own] + [added]
