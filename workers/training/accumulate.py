"""A window, worked through: micro-batches forward and backward, replayed where it must be, one step.

This and `window.py` are the accumulation; they are read together.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.profiler import record_function

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule
from workers.training import guards
from workers.training import model as models
from workers.training.balance import Balance
from workers.training.batches import Cursor, Groups, MicroBatch, cut_window, tokens_of
from workers.training.loss import Forward
from workers.training.noise_scale import Measurement
from workers.training.prefetch import prefetched
from workers.training.start import Indices, Training
from workers.training.window import Closed, Window


class StopRequested(Exception):
    """Between two micro-batches the trainer was told to stop; the window was abandoned."""


@dataclass(frozen=True)
class Added:
    """What went into a window."""

    data_seconds: float
    """Wall time spent waiting for micro-batches."""
    padded_tokens: int


@dataclass(frozen=True)
class Trained:
    """A window that was worked through, applied or not. Seconds of wall time."""

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
    """
    spec, state, began = training.order.spec, training.state, time.perf_counter()
    accept = guards.spike(state.recent_losses, spec.loss_spike_zscore) if spec.loss_spike_zscore else None
    while True:
        measures = _measures(training)
        groups = cut(training, window, training.cut, measured=measures)
        added = None
        training.memory.begin()
        try:
            added = accumulate(training, window, groups, denominator, tap=measures)
        except RuntimeError as error:
            if not guards.is_out_of_memory(error):
                raise
        if added is None or training.memory.exceeded():  # by now the error and its frames' tensors are gone
            make_room(training, groups, training.lengths_of(window))
            continue
        closed = guards.close(training.window, accept)
        if not closed.overflow:
            seconds = time.perf_counter() - began
            measurement = _measurement(training, window, groups, closed, denominator)
            return Trained(closed, groups, added.padded_tokens, added.data_seconds, seconds, measurement)
        training.reporter.event("overflow", "fp16 overflow: the window is replayed at half the loss scale.")


def accumulate(
    training: Training, window: Indices, groups: Groups, denominator: float, *, tap: bool = False
) -> Added:
    """Opens a window, and adds every micro-batch to it; nothing is applied yet.

    Args:
        tap: note the gradient's norm after the first of several micro-batches.

    Raises:
        StopRequested: told to stop; the window was abandoned.
    """
    data_seconds, padded_tokens = 0.0, 0
    observe_routing(training, window, groups)
    seed_window(training.order.spec.seed, training.cursor)
    training.window.open(denominator, len(groups))
    training.begin_window()
    batches = prefetched(training.loader, lambda g: training.fetch(window[g].tolist()), groups)
    for number in range(len(groups)):
        if training.stop():
            training.window.abandon()
            raise StopRequested
        requested = time.perf_counter()
        with record_function("accrue.data"):
            batch = next(batches)
        data_seconds += time.perf_counter() - requested
        padded_tokens += batch.input_ids.numel()
        add(training, batch)
        training.note_progress(number + 1)
        if tap and number == 0 and len(groups) > 1:
            training.window.tap()
    return Added(data_seconds, padded_tokens)


class Accumulating(Protocol):
    """What it takes to add a micro-batch to a window."""

    window: Window
    balance: Balance | None

    def forward(self, batch: MicroBatch) -> Forward: ...


def add(training: Accumulating, batch: MicroBatch) -> None:
    """Forward and backward of one micro-batch into the open window."""
    with record_function("accrue.forward"):
        forward = training.forward(batch)
        balance = training.balance
        share = balance.share(forward.router_logits, batch) if balance else None
    with record_function("accrue.backward"):
        training.window.add(forward.loss_sum, share)


def cut(training: Training, window: Indices, by: MicroBatchRule, *, measured: bool = False) -> Groups:
    """A window's micro-batches, as groups of positions in it.

    Args:
        measured: the first is drawn at random, for the noise scale.
    """
    first = None
    if measured:
        place = [training.order.spec.seed, training.state.epoch, training.state.consumed]
        first = np.random.Generator(np.random.PCG64(place))
    planned, lengths = training.order.rank.micro_batch_rule, training.lengths_of(window)

    def groups_by(own: MicroBatchRule) -> Groups:
        return cut_window(
            lengths,
            own,
            by_length=training.order.spec.clip_mode != "each_micro_batch",
            packed=training.form.packed,
            rows=planned.samples if isinstance(planned, FixedSize) else None,
            first=first,
        )

    groups = groups_by(by)
    if isinstance(planned, FixedCount) and len(groups) < min(planned.micro_batches, len(window)):
        return groups_by(planned)  # the budget learned would allow fewer than were asked for
    return groups


def seed_window(seed: int, cursor: Cursor) -> None:
    """Seeds dropout from the place in the data: a resume or a replay sees what the first run saw."""
    mixed = np.random.SeedSequence([seed, cursor.epoch, cursor.consumed]).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed[0]) >> 1)


def observe_routing(training: Training, window: Indices, groups: Groups) -> None:
    """The first forward of a mixture of experts, without gradient, which counts what the routers choose.

    It draws the same random numbers as the second, so that both route alike.
    """
    balance = training.balance
    if balance is None:
        return
    balance.begin(len(window))
    if balance.scope != "window":
        return
    seed_window(training.order.spec.seed, training.cursor)
    with record_function("accrue.routing"):
        for group in groups:
            if training.stop():
                raise StopRequested
            batch = training.fetch(window[group].tolist())
            with training.autocast():
                balance.observe(training.token_loss.router_logits(batch), batch)


def _measures(training: Training) -> bool:
    """Whether the noise scale is measured in the window at hand."""
    spec = training.order.spec
    every = spec.noise_scale_every
    return every is not None and training.state.step % every == 0 and spec.clip_mode != "each_micro_batch"


def _measurement(
    training: Training, window: Indices, groups: Groups, closed: Closed, denominator: float
) -> Measurement | None:
    if closed.tapped_norm is None or not closed.applied:
        return None
    first = window[groups[0]]
    return Measurement(
        first_norm=closed.tapped_norm,
        first_samples=len(first),
        first_targets=training.samples.denominator(first),
        norm=closed.grad_norm,
        samples=len(window),
        targets=denominator,
    )


def make_room(training: Training, groups: Groups, lengths: Indices) -> None:
    """Takes less memory after running out of it: smaller micro-batches, or activations made twice.

    Raises:
        CannotTrain: neither is left.
    """
    training.window.abandon()
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    spec, state = training.order.spec, training.state
    widest = max(groups, key=lambda group: tokens_of(lengths[group], training.form.packed))
    tokens = tokens_of(lengths[widest], training.form.packed)
    if len(widest) > 1 and spec.auto_adjust_batch_size:
        budget = guards.learn_smaller_budget(state, tokens)
        message = f"Out of memory: the window is replayed with at most {budget} tokens a micro-batch."
        training.reporter.event(
            "out_of_memory", message, "warning", token_budget=budget, failed_tokens=tokens
        )
        training.shrink_buckets()
    elif not (spec.gradient_checkpointing or state.checkpointing):
        state.checkpointing = True
        models.recompute_activations(training.model)
        message = (
            f"Out of memory at {len(widest)} samples and {tokens} tokens: the window is replayed with "
            "gradient checkpointing, which gives the same gradient for more computation."
        )
        training.reporter.event("out_of_memory", message, "warning", failed_tokens=tokens)
    else:
        raise guards.out_of_remedies(training.order.plan, len(widest), tokens)
