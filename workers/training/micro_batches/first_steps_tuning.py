"""Measures micro-batches of several sizes between two windows of the run, on its data and device.

Each size runs forward and backward over the same samples. Nothing is applied, so the run continues as if
nothing had been measured. This happens after the first steps, when the optimizer's states exist.
"""

import math
import time
from dataclasses import replace

import numpy as np

from app.contract.plan import TokenBudget
from app.contract.reports import MeasuredSize, Tuning, smallest_of_the_fastest
from workers.training.accumulate import accumulate
from workers.training.data.batch_loader import Indices
from workers.training.devices import device_errors, memory
from workers.training.distributed.group import ALONE
from workers.training.exceptions import InterruptionRequested
from workers.training.micro_batches.batches import Groups, tokens_of
from workers.training.training_run import TrainingRun

AFTER_STEPS = 2
"""Steps after which a run has warmed up: the optimizer's states exist, and kernels are chosen."""

ROUNDS = 3
"""The number of measurements of each size, in turns. The best time counts, since noise only adds time."""

_SPAN = 4
"""Enough samples are used to fill this many of the largest micro-batches, or else the whole window."""

LADDER = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
"""Sizes to measure, relative to the planned one."""


def measure_sizes(training: TrainingRun) -> Tuning:
    """Measures, and returns the smallest of the fastest micro-batches. Every rank measures its own device.

    Raises:
        InterruptionRequested: an interruption was requested on any rank; nothing was changed.
    """
    group, tuning = training.group, None
    try:
        tuning = _measure_ladder(replace(training, group=ALONE, budgets=[training.budget]))
    except InterruptionRequested:
        if group.size == 1:
            raise
    (stopped,) = group.any(tuning is None)
    if stopped or tuning is None:
        raise InterruptionRequested
    return tuning


def _measure_ladder(training: TrainingRun) -> Tuning:
    loader, budget = training.loader, training.budget
    most, whole = budget.most_worth_measuring, training.next_window()
    planned = budget.tokens(int(loader.lengths(whole).max()))
    ladder = candidates(planned, most, loader.lengths(whole))
    window = _samples_to_measure(whole, loader.lengths(whole), ladder[0])
    cuts: dict[int, Groups] = {}
    for size in ladder:  # of sizes that give equally many micro-batches, keep the smallest
        groups = budget.cut(loader.lengths(window), TokenBudget(tokens=size))
        cuts = {other: own for other, own in cuts.items() if len(own) != len(groups)} | {size: groups}
    seconds, peaks = _measure(training, window, cuts)
    lengths = loader.lengths(window)
    tokens = int(loader.samples.tokens[window].sum())
    tried = tuple(
        MeasuredSize(
            token_budget=size,
            micro_batches=len(cuts[size]),
            largest_tokens=max(tokens_of(lengths[g], loader.layout.packed) for g in cuts[size]),
            samples_per_second=len(window) / best,
            tokens_per_second=tokens / best,
            peak_bytes=peaks[size],
        )
        for size, best in seconds.items()
    )
    chosen = (
        smallest_of_the_fastest((each.token_budget, each.tokens_per_second) for each in tried)
        if tried
        else planned
    )
    return Tuning(token_budget=chosen, samples=len(window), tried=tried)


def apply(training: TrainingRun, tuning: Tuning) -> None:
    """Uses the chosen token budget for the rest of the run, and reports it as an event."""
    before, group = training.budget.tokens(0), training.group
    own = [float(tuning.token_budget) if rank == group.rank else 0.0 for rank in range(group.size)]
    for budget, tokens in zip(training.budgets, group.sum(own), strict=True):
        budget.set_measured(round(tokens))
    chosen = next((each for each in tuning.tried if each.token_budget == tuning.token_budget), None)
    speed = f" ({chosen.samples_per_second:.3g} samples/s)" if chosen is not None else ""
    training.reporter.event(
        "tuned",
        f"From now on, micro-batches have at most {tuning.token_budget} tokens{speed}; before, {before}. Of "
        f"the {len(tuning.tried)} sizes measured on {tuning.samples} samples, this is the smallest within "
        "3 % of the fastest.",
        **tuning.model_dump(mode="json"),
    )


def candidates(planned: int, most: int, lengths: Indices) -> list[int]:
    """Token budgets worth measuring, largest first: no larger than memory allows or the whole window needs,
    and no smaller than the longest sample, since smaller ones would give the same micro-batches.
    """
    longest, together = int(lengths.max()), int(lengths.max()) * len(lengths)
    highest = max(longest, min(most, together))
    return sorted({min(max(round(planned * step), longest), highest) for step in LADDER}, reverse=True)


def _samples_to_measure(window: Indices, lengths: Indices, largest: int) -> Indices:
    """The first samples of a window, as many as the measurement needs."""
    return window[: int(np.searchsorted(np.cumsum(lengths), _SPAN * largest)) + 1]


def _measure(
    training: TrainingRun, window: Indices, cuts: dict[int, Groups]
) -> tuple[dict[int, float], dict[int, int]]:
    """The best time and the highest peak of each size; without those that did not fit."""
    seconds, peaks = dict.fromkeys(cuts, math.inf), dict.fromkeys(cuts, 0)
    for _ in range(ROUNDS):
        for budget in list(seconds):
            memory.reset_peak(training.replica.device)
            took = _pass(training, window, cuts[budget])
            if took is None:
                del seconds[budget]
                continue
            seconds[budget] = min(seconds[budget], took)
            peaks[budget] = max(peaks[budget], memory.peak(training.replica.device))
    memory.begin_steps(training.replica.device)
    return seconds, peaks


def _pass(training: TrainingRun, window: Indices, groups: Groups) -> float | None:
    """Seconds of one pass over the samples, or None if it ran out of memory."""
    began = time.perf_counter()
    fits = False
    try:
        accumulate(training, window, [groups], training.loader.samples.denominator(window) or 1.0)
        training.replica.window.is_finite()  # waits for the device
        training.replica.window.abandon()
        fits = True
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error):
            raise
    if fits:
        return time.perf_counter() - began
    training.replica.free_memory()
    return None
