"""Runs one window: micro-batches forward and backward, replays if necessary, and one step.

This module and `window.py` together implement gradient accumulation.
"""

import contextlib
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.profiler import record_function

from app.contract.fail_points import fail_point
from app.contract.plan import FixedCount, MicroBatchRule
from app.contract.reports import LearnedLimits
from workers.training.data.batch_loader import Indices
from workers.training.devices import device_errors, memory
from workers.training.devices.stopwatch import Lap
from workers.training.distributed.partition import partition, partition_by_length
from workers.training.distributed.rank_timeout import WindowSize
from workers.training.distributed.shares import WindowWork
from workers.training.exceptions import CannotTrain, InterruptionRequested, OtherRankFailed, RanksMustRestart
from workers.training.gradients.noise_scale import Measurement
from workers.training.losses.objectives import MEASURED
from workers.training.losses.window_scope import run_prepass
from workers.training.micro_batches.batches import Groups, needs_parting, tokens_of, without_first
from workers.training.models.trainable import recompute_activations
from workers.training.passes import filler, passes_of_rank
from workers.training.recovery import guards
from workers.training.recovery.decision import Verdict, WindowOutcome, decide
from workers.training.training_run import TrainingRun
from workers.training.window import WindowResult


@dataclass(frozen=True)
class RankMeasurements:
    """Time and tokens of this rank's part of a window."""

    data_seconds: float
    """Wall time spent waiting for micro-batches."""
    padded_tokens: int
    seconds: Callable[[], float]
    """Time of the device, from the first micro-batch to the end of the last one; waits for the device."""
    laps: Callable[[], tuple[Lap, ...]]
    """Each micro-batch, if they are measured one by one; waits for the device."""


@dataclass(frozen=True)
class TrainedWindow:
    """A trained window, whether applied or not. Times are this rank's wall-clock seconds."""

    result: WindowResult
    groups_by_rank: list[Groups]
    work: tuple[WindowWork, ...]
    """What each rank did."""
    data_seconds: float
    seconds: float
    measurement: Measurement | None
    laps: tuple[Lap, ...] = ()
    """This rank's micro-batches, if they are measured one by one."""

    @property
    def groups(self) -> Groups:
        """The micro-batches of all ranks."""
        return [group for groups in self.groups_by_rank for group in groups]

    @property
    def padded_tokens(self) -> int:
        """Padded tokens of all ranks."""
        return sum(each.padded_tokens for each in self.work)


def train_window(training: TrainingRun, window: Indices, denominator: float) -> TrainedWindow:
    """Forward and backward of every micro-batch, and one optimizer step if the sum is finite.

    The window is replayed as a whole, from the same random state, after an fp16 overflow (at half the
    loss scale) and after running out of memory (in smaller micro-batches, or recomputing activations).

    Raises:
        InterruptionRequested: an interruption was requested; the window was abandoned.
        CannotTrain: there is no memory for the smallest micro-batch, or for the optimizer's step.
    """
    spec, accumulation, began = training.assignment.spec, training.replica.window, time.perf_counter()
    recent = training.state.losses.recent
    accept = guards.spike_filter(recent, spec.loss_spike_zscore) if spec.loss_spike_zscore else None
    while True:
        measures = _measures(training)
        groups = divide(training, window, measured=measures)
        size = _size_of(training, window, groups)
        with contextlib.nullcontext() if size is None else training.group.limited_waiting(size):
            outcome, added = accumulate_on_all_ranks(
                training, window, groups, denominator, record_first_norm=measures
            )
        verdict = decide(outcome, scale_can_fall=accumulation.scale_can_fall, accept=accept)
        if verdict is Verdict.INTERRUPT:
            raise InterruptionRequested
        if verdict is Verdict.REPLAY_IN_LESS_MEMORY:
            reduce_memory(training, groups, outcome.out_of_memory_on, training.loader.lengths(window))
            continue
        assert outcome.totals is not None
        assert added is not None
        result = guards.close_window(accumulation, outcome.totals, verdict)
        if verdict is not Verdict.REPLAY_AT_LOWER_LOSS_SCALE:
            seconds = time.perf_counter() - began
            if size is not None:
                training.group.note_window(seconds, size)
            measurement = _measurement(training, window, groups, result, denominator)
            work = _work(training, window, groups, added)
            laps = added.laps()
            return TrainedWindow(result, groups, work, added.data_seconds, seconds, measurement, laps)
        training.reporter.event("overflow", "fp16 overflow: the window is replayed at half the loss scale.")


def accumulate_on_all_ranks(
    training: TrainingRun,
    window: Indices,
    groups: list[Groups],
    denominator: float,
    *,
    record_first_norm: bool = False,
) -> tuple[WindowOutcome, RankMeasurements | None]:
    """Accumulates a window on all ranks and returns what happened; after a failure, its tensors are
    released."""
    replica, added = training.replica, None
    out_of_memory = interruption_requested = False
    replica.memory.begin()
    try:
        # The passes of a divided model exchange its parameters, so that they wait for other ranks.
        with training.group.waiting() if replica.is_sharded else contextlib.nullcontext():
            added = accumulate(training, window, groups, denominator, record_first_norm=record_first_norm)
        out_of_memory = replica.memory.exceeded()
    except InterruptionRequested:
        interruption_requested = True
    except OtherRankFailed:
        pass  # the other rank says why
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error):
            raise
        if replica.is_sharded:
            raise restart_in_less_memory(training, window, groups) from error
        out_of_memory = True
    return replica.window.sum_over_ranks(
        out_of_memory=out_of_memory, interruption_requested=interruption_requested
    ), added


def accumulate(
    training: TrainingRun,
    window: Indices,
    groups: list[Groups],
    denominator: float,
    *,
    record_first_norm: bool = False,
) -> RankMeasurements:
    """Opens a window, and adds every micro-batch of this rank to it; nothing is applied yet.

    Args:
        groups: the micro-batches of each rank.
        record_first_norm: whether rank 0 records the gradient's norm after the first of several
            micro-batches.

    Raises:
        InterruptionRequested: an interruption was requested; the window was abandoned.
        OtherRankFailed: another rank could not do its part.
    """
    replica, reporter, progress = training.replica, training.reporter, training.state.progress
    own, together = groups[training.group.rank], passes_of_rank(training, groups)
    data_seconds, padded_tokens = 0.0, 0
    record_first_norm = record_first_norm and training.group.leads and sum(map(len, groups)) > 1
    training.seed_window()
    replica.window.open(
        denominator,
        len(own),
        passes=together,
        by_rank=list(map(len, groups)),
        exchange_early=training.group.size > 1 and not (record_first_norm and len(own) == 1),
        measures=0 if replica.token_loss.objective is None else MEASURED,
    )
    run_prepass(training, window, groups, training.group)
    training.seed_window()
    reporter.begin_window()
    batches = training.loader.micro_batches(window, own)
    replica.stopwatch.begin()
    for number in range(len(own)):
        training.check_interruption()
        fail_point(f"rank-{training.group.rank}.micro_batch")
        requested = time.perf_counter()
        with record_function("accrue.data"):
            batch = next(batches)
        data_seconds += time.perf_counter() - requested
        padded_tokens += batch.input_ids.numel()
        replica.add(batch)
        replica.stopwatch.lap(batch.input_ids.numel())
        if training.assignment.spec.log_accumulation:
            reporter.progress(progress.step, progress.micro_step, number + 1)
        if record_first_norm and number == 0:
            replica.window.record_first_norm()
    for _ in range(together - len(own)):
        replica.add_nothing(filler(training, window))
    replica.stopwatch.end()
    replica.window.wait_until_added()
    return RankMeasurements(data_seconds, padded_tokens, replica.stopwatch.seconds, replica.stopwatch.laps)


def divide(training: TrainingRun, window: Indices, *, measured: bool = False) -> list[Groups]:
    """Every rank's micro-batches of a window, as groups of positions in it.

    Args:
        measured: whether the first micro-batch is drawn at random, to measure the noise scale.
    """
    lengths, budgets = training.loader.lengths(window), training.budgets
    rules = [budget.rule(training.batch) for budget in budgets]
    first = None
    if measured:
        position = training.state.position
        place = [training.assignment.spec.seed, position.epoch, position.consumed]
        first = np.random.Generator(np.random.PCG64(place))
    if len(budgets) == 1:
        return [budgets[0].cut(lengths, rules[0], first=first)]
    head: Groups = []
    rest = np.arange(len(window))
    if first is not None:
        head = [budgets[0].draw_first(lengths, _of_all_ranks(rules), first)]
        rest = np.setdiff1d(rest, head[0])
        rules[0] = without_first(rules[0])
    initial_loads = [budgets[0].cost(lengths, rules[0], head), *(0.0 for _ in budgets[1:])]
    costs = [budget.cost_model(lengths, rule) for budget, rule in zip(budgets, rules, strict=True)]
    known = [each for each in costs if each is not None]
    shares = training.shares.now
    if len(known) < len(costs):
        taken = partition(lengths[rest], shares, by_length=budgets[0].by_length, initial_loads=initial_loads)
    else:
        taken = partition_by_length(lengths[rest], shares, known, initial_loads=initial_loads)
    groups = [head, *([] for _ in budgets[1:])]
    for own, budget, rule, part in zip(groups, budgets, rules, taken, strict=True):
        positions = rest[part]
        cut_part = budget.cut(lengths[positions], rule, taken=len(own))
        own.extend(positions[group].tolist() for group in cut_part)
    return groups


def _of_all_ranks(rules: Sequence[MicroBatchRule]) -> MicroBatchRule:
    """The rule that rank 0 would follow if it took the whole window alone. If the plan fixes each rank's
    number of micro-batches, that is their sum."""
    counts = [rule.micro_batches for rule in rules if isinstance(rule, FixedCount)]
    return FixedCount(micro_batches=sum(counts)) if isinstance(rules[0], FixedCount) else rules[0]


def _size_of(training: TrainingRun, window: Indices, groups: list[Groups]) -> WindowSize | None:
    """What the window's time depends on; None if that cannot be known: compiling and
    writing a profile can take any amount of time."""
    spec, packed = training.assignment.spec, training.loader.layout.packed
    if len(groups) == 1 or spec.compile or spec.profile:
        return None
    lengths = training.loader.lengths(window)
    tokens = [[tokens_of(lengths[group], packed) for group in own] for own in groups]
    longest = [[int(lengths[group].max()) for group in own] for own in groups]
    pairs = [sum(map(operator.mul, *both)) for both in zip(tokens, longest, strict=True)]
    return WindowSize(max(map(len, groups)), max(map(sum, tokens)), max(pairs))


def _work(
    training: TrainingRun, window: Indices, groups: list[Groups], own: RankMeasurements
) -> tuple[WindowWork, ...]:
    """What each rank did in a window."""
    tokens, group = training.loader.samples.tokens, training.group
    in_window, budgets = training.loader.lengths(window), training.budgets
    peak = memory.peak(training.replica.device)
    measured = group.all_gather([own.padded_tokens, own.seconds(), own.data_seconds, peak])
    return tuple(
        WindowWork(
            micro_batches=len(taken),
            samples=sum(map(len, taken)),
            tokens=sum(int(tokens[window[each]].sum()) for each in taken),
            cost=budget.cost(in_window, budget.rule(training.batch), taken),
            padded_tokens=round(padded),
            seconds=seconds,
            data_seconds=waited,
            peak_bytes=round(most),
        )
        for budget, taken, (padded, seconds, waited, most) in zip(budgets, groups, measured, strict=True)
    )


def _measures(training: TrainingRun) -> bool:
    """Whether the noise scale is measured in the current window."""
    spec, rule = training.assignment.spec, training.budgets[0].rule(training.batch)
    every = spec.noise_scale_every
    if training.replica.is_sharded:
        return False  # the gradient of a single micro-batch is never known
    separate_above = training.loader.layout.separate_above
    if separate_above is not None and needs_parting(
        training.loader.lengths(training.next_window()), separate_above
    ):
        return False  # a random micro-batch would not represent the window
    if training.group.size > 1 and isinstance(rule, FixedCount) and rule.micro_batches == 1:
        return False  # rank 0 has no second micro-batch for the samples that the random one leaves over
    return every is not None and training.state.step % every == 0 and spec.clip_mode != "each_micro_batch"


def _measurement(
    training: TrainingRun, window: Indices, groups: list[Groups], result: WindowResult, denominator: float
) -> Measurement | None:
    if result.first_norm is None or not result.applied:
        return None
    first = window[groups[0][0]]
    return Measurement(
        first_norm=result.first_norm,
        first_samples=len(first),
        first_targets=training.loader.samples.denominator(first),
        norm=result.grad_norm,
        samples=len(window),
        targets=denominator,
    )


def restart_in_less_memory(training: TrainingRun, window: Indices, groups: list[Groups]) -> RanksMustRestart:
    """Records what this rank has learned by running out of memory, where all ranks run at the same time.

    Raises:
        CannotTrain: there is no memory for a single sample.
    """
    rank = training.group.rank
    reduce_memory(training, groups, [rank], training.loader.lengths(window))
    learned = LearnedLimits(
        tokens=training.budget.learned.tokens,
        failed_tokens=training.budget.learned.failed_tokens,
        checkpointing=training.state.fallbacks.checkpointing,
    )
    training.run.write_learned(rank, learned)
    return RanksMustRestart(f"rank {rank} ran out of memory")


def _recompute_activations(training: TrainingRun, samples: int, tokens: int) -> None:
    """Turns gradient checkpointing on, after running out of memory.

    Args:
        samples, tokens: those of the micro-batch.

    Raises:
        CannotTrain: the model does not support it.
    """
    try:
        recompute_activations(training.replica.model)
    except CannotTrain:
        plan = training.assignment.plan
        raise device_errors.out_of_memory_error(plan, samples, tokens, recomputed=False) from None
    training.replica.recomputes_activations = True


def reduce_memory(
    training: TrainingRun, groups: list[Groups], failed_on: Sequence[int], lengths: Indices
) -> None:
    """Reduces memory use after running out of memory: by smaller micro-batches on the ranks that failed, or
    by recomputing activations on all of them.

    Args:
        groups: the micro-batches of each rank.
        failed_on: the ranks that ran out of memory.

    Raises:
        CannotTrain: neither is possible any more.
    """
    training.replica.free_memory()
    spec, fallbacks = training.assignment.spec, training.state.fallbacks
    already_recomputes = spec.gradient_checkpointing or fallbacks.checkpointing
    for rank in failed_on:
        budget = training.budgets[rank]
        if not groups[rank]:
            raise device_errors.out_of_memory_error(training.assignment.plan, 0, 0)
        widest = max(groups[rank], key=lambda group: tokens_of(lengths[group], budget.packed))
        tokens = tokens_of(lengths[widest], budget.packed)
        on = f" on rank {rank}" if len(groups) > 1 else ""
        if len(widest) > 1 and spec.auto_adjust_batch_size:
            smaller = budget.lower_after_failure(tokens)
            message = (
                f"Out of memory{on}: the window is replayed with at most {smaller} tokens per micro-batch."
            )
            training.reporter.event(
                "out_of_memory", message, "warning", token_budget=smaller, failed_tokens=tokens, rank=rank
            )
            if rank == training.group.rank:
                training.loader.limit_buckets(smaller)
        elif not already_recomputes:
            if not fallbacks.checkpointing:  # otherwise another rank's failure has just turned it on
                _recompute_activations(training, len(widest), tokens)
            fallbacks.checkpointing = True
            message = (
                f"Out of memory{on} at {len(widest)} samples and {tokens} tokens: the window is replayed "
                "with gradient checkpointing, which gives the same gradient for more computation."
            )
            training.reporter.event("out_of_memory", message, "warning", failed_tokens=tokens, rank=rank)
        else:
            raise device_errors.out_of_memory_error(training.assignment.plan, len(widest), tokens)
