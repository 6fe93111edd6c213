"""Runs one window: micro-batches forward and backward, replays if necessary, and one step.

This module and `window.py` together implement gradient accumulation.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import record_function

from app.contract.plan import MicroBatchRule
from workers.training import guards
from workers.training import model as models
from workers.training.batches import Cursor, Groups, tokens_of
from workers.training.decision import Observed, Verdict, decide
from workers.training.exceptions import StopRequested
from workers.training.loader import Indices
from workers.training.noise_scale import Measurement
from workers.training.start import Training
from workers.training.window import Closed


@dataclass(frozen=True)
class WindowCost:
    """Waiting time and tokens of an accumulated window."""

    data_seconds: float
    """Wall time spent waiting for micro-batches."""
    padded_tokens: int


@dataclass(frozen=True)
class Trained:
    """A trained window, whether applied or not. Times are wall-clock seconds."""

    closed: Closed
    groups: Groups
    padded_tokens: int
    data_seconds: float
    seconds: float
    measurement: Measurement | None


def train_window(training: Training, window: Indices, denominator: float) -> Trained:
    """Forward and backward of every micro-batch, and one optimizer step if the sum is finite.

    The window is replayed as a whole, from the same random state, after an fp16 overflow (at half the
    loss scale) and after running out of memory (in smaller micro-batches, or recomputing activations).

    Raises:
        StopRequested: a stop was requested; the window was abandoned.
        CannotTrain: there is no memory for the smallest micro-batch, or for the optimizer's step.
    """
    spec, own, began = training.assignment.spec, training.replica.window, time.perf_counter()
    recent = training.state.losses.recent
    accept = guards.spike_filter(recent, spec.loss_spike_zscore) if spec.loss_spike_zscore else None
    while True:
        measures = _measures(training)
        groups = cut(training, window, training.rule, measured=measures)
        observed, added = _observe(training, window, groups, denominator, record_first_norm=measures)
        verdict = decide(observed, scale_can_fall=own.scale_can_fall, accept=accept)
        if verdict is Verdict.STOP:
            raise StopRequested
        if verdict is Verdict.REPLAY_IN_LESS_MEMORY:
            reduce_memory(training, groups, training.loader.lengths(window))
            continue
        assert observed.totals is not None
        assert added is not None
        closed = guards.finish(own, observed.totals, verdict)
        if verdict is not Verdict.REPLAY_AT_LOWER_LOSS_SCALE:
            seconds = time.perf_counter() - began
            measurement = _measurement(training, window, groups, closed, denominator)
            return Trained(closed, groups, added.padded_tokens, added.data_seconds, seconds, measurement)
        training.reporter.event("overflow", "fp16 overflow: the window is replayed at half the loss scale.")


def _observe(
    training: Training, window: Indices, groups: Groups, denominator: float, *, record_first_norm: bool
) -> tuple[Observed, WindowCost | None]:
    """Accumulates a window and returns what happened; after a failure, its tensors are released."""
    replica = training.replica
    replica.memory.begin()
    try:
        added = accumulate(training, window, groups, denominator, record_first_norm=record_first_norm)
        if replica.memory.exceeded():
            return Observed(out_of_memory=True), None
        return Observed(replica.window.totals()), added
    except StopRequested:
        return Observed(stop_requested=True), None
    except RuntimeError as error:
        if not guards.is_out_of_memory(error):
            raise
        return Observed(out_of_memory=True), None


def accumulate(
    training: Training,
    window: Indices,
    groups: Groups,
    denominator: float,
    *,
    record_first_norm: bool = False,
) -> WindowCost:
    """Opens a window, and adds every micro-batch to it; nothing is applied yet.

    Args:
        record_first_norm: whether to record the gradient's norm after the first of several micro-batches.

    Raises:
        StopRequested: a stop was requested; the window was abandoned.
    """
    replica, reporter, progress = training.replica, training.reporter, training.state.progress
    data_seconds, padded_tokens = 0.0, 0
    observe_routing(training, window, groups)
    seed_window(training.assignment.spec.seed, training.state.position.cursor)
    replica.window.open(denominator, len(groups))
    reporter.begin_window()
    batches = training.loader.micro_batches(window, groups)
    for number in range(len(groups)):
        training.check_stop()
        requested = time.perf_counter()
        with record_function("accrue.data"):
            batch = next(batches)
        data_seconds += time.perf_counter() - requested
        padded_tokens += batch.input_ids.numel()
        replica.add(batch)
        if training.assignment.spec.log_accumulation:
            reporter.progress(progress.step, progress.micro_step, number + 1)
        if record_first_norm and number == 0 and len(groups) > 1:
            replica.window.record_first_norm()
    return WindowCost(data_seconds, padded_tokens)


def cut(training: Training, window: Indices, rule: MicroBatchRule, *, measured: bool = False) -> Groups:
    """A window's micro-batches, as groups of positions in it.

    Args:
        measured: whether the first micro-batch is drawn at random, to measure the noise scale.
    """
    first = None
    if measured:
        position = training.state.position
        place = [training.assignment.spec.seed, position.epoch, position.consumed]
        first = np.random.Generator(np.random.PCG64(place))
    return training.budget.cut(training.loader.lengths(window), rule, first=first)


def seed_window(seed: int, cursor: Cursor) -> None:
    """Seeds dropout from the position in the data, so that a resume or a replay draws the same numbers."""
    mixed = np.random.SeedSequence([seed, cursor.epoch, cursor.consumed]).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed[0]) >> 1)


def observe_routing(training: Training, window: Indices, groups: Groups) -> None:
    """Runs the first forward pass of a mixture of experts, without gradient, to count the routers' choices.

    It draws the same random numbers as the second forward pass, so that both route the same way.
    """
    balance = training.replica.balance
    if balance is None:
        return
    balance.begin(len(window))
    if balance.scope != "window":
        return
    seed_window(training.assignment.spec.seed, training.state.position.cursor)
    with record_function("accrue.routing"):
        for group in groups:
            training.check_stop()
            training.replica.observe_routing(training.loader.fetch(window[group].tolist()))


def _measures(training: Training) -> bool:
    """Whether the noise scale is measured in the current window."""
    spec = training.assignment.spec
    every = spec.noise_scale_every
    return every is not None and training.state.step % every == 0 and spec.clip_mode != "each_micro_batch"


def _measurement(
    training: Training, window: Indices, groups: Groups, closed: Closed, denominator: float
) -> Measurement | None:
    if closed.first_norm is None or not closed.applied:
        return None
    first = window[groups[0]]
    return Measurement(
        first_norm=closed.first_norm,
        first_samples=len(first),
        first_targets=training.loader.samples.denominator(first),
        norm=closed.grad_norm,
        samples=len(window),
        targets=denominator,
    )


def reduce_memory(training: Training, groups: Groups, lengths: Indices) -> None:
    """Reduces memory use after running out of memory: by smaller micro-batches, or by recomputing
    activations.

    Raises:
        CannotTrain: neither is possible any more.
    """
    training.replica.free_memory()
    spec, fallbacks, budget = training.assignment.spec, training.state.fallbacks, training.budget
    widest = max(groups, key=lambda group: tokens_of(lengths[group], budget.packed))
    tokens = tokens_of(lengths[widest], budget.packed)
    if len(widest) > 1 and spec.auto_adjust_batch_size:
        smaller = budget.lower_after_failure(tokens)
        message = f"Out of memory: the window is replayed with at most {smaller} tokens per micro-batch."
        training.reporter.event(
            "out_of_memory", message, "warning", token_budget=smaller, failed_tokens=tokens
        )
        training.loader.shrink_buckets(smaller)
    elif not (spec.gradient_checkpointing or fallbacks.checkpointing):
        fallbacks.checkpointing = True
        models.recompute_activations(training.replica.model)
        message = (
            f"Out of memory at {len(widest)} samples and {tokens} tokens: the window is replayed with "
            "gradient checkpointing, which gives the same gradient for more computation."
        )
        training.reporter.event("out_of_memory", message, "warning", failed_tokens=tokens)
    else:
        raise guards.out_of_memory_error(training.assignment.plan, len(widest), tokens)
