"""The run, top to bottom: load, resume, then window after window until the steps are made."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.schemas.run import LogLine, Outcome
from app.schemas.spec import Cut, Order, TokenBudget
from workers.run_directory import Reporter, RunDirectory
from workers.training import checkpoint, guards, memory
from workers.training import model as models
from workers.training.batches import (
    Cursor,
    Groups,
    MicroBatch,
    after,
    collate,
    cut_window,
    epoch_order,
    window_at,
)
from workers.training.checkpoint import TrainingState
from workers.training.data import Prepared, Samples, prepare
from workers.training.faults import CannotTrain, Interrupted
from workers.training.loss import loss_sum
from workers.training.optimizer import make_optimizer, set_rate
from workers.training.schedule import rate_factor, warmup_of
from workers.training.window import Clipping, Closed, LossScale, Window

EMA = 0.1
"""Weight of the newest loss in the moving average."""

FIRST_FP16_SCALE = 65536.0

Stop = Callable[[], bool]
Indices = npt.NDArray[np.int64]


class StopRequested(Exception):
    """Between two micro-batches the trainer was told to stop; the window was abandoned."""


@dataclass
class Training:
    """A run in progress: everything that one window needs."""

    order: Order
    run: RunDirectory
    reporter: Reporter
    stop: Stop
    device: torch.device
    model: Any
    optimizer: torch.optim.Optimizer
    window: Window
    loss_scale: LossScale | None
    samples: Samples
    pad_id: int
    steps_total: int
    state: TrainingState
    cut: Cut
    _order_of_epoch: tuple[int, Indices] = field(default=(-1, np.empty(0, np.int64)))

    def fetch(self, samples: list[int]) -> MicroBatch:
        """Reads samples from disk into one padded micro-batch."""
        return collate(self.samples.read, samples, self.pad_id)

    def loss(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, in the plan's precision."""
        with models.autocast(self.order.plan):
            return loss_sum(self.model, batch.to(self.device))

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.state.epoch, self.state.consumed)

    @property
    def finished(self) -> bool:
        epochs = self.order.spec.epochs
        return self.state.epoch >= epochs if epochs is not None else self.state.step >= self.steps_total

    def next_window(self) -> Indices:
        """The samples of the window at the cursor."""
        epoch = self.state.epoch
        if self._order_of_epoch[0] != epoch:
            order = epoch_order(len(self.samples), self.order.spec.seed, epoch)
            self._order_of_epoch = (epoch, order)
        return window_at(self.cursor, self._order_of_epoch[1], self.order.spec.effective_batch_size)


@dataclass(frozen=True)
class Trained:
    """A window that was worked through, applied or not. Seconds of wall time."""

    closed: Closed
    groups: Groups
    padded_tokens: int
    data_seconds: float
    seconds: float


def fit(run: RunDirectory, order: Order, reporter: Reporter, stop: Stop) -> Outcome:
    """Trains what the order says, from the last checkpoint if there is one, and saves the model.

    Raises:
        CannotTrain: the job cannot be trained as it stands.
        Interrupted: told to stop; a checkpoint was written.
    """
    training = start(run, order, reporter, stop)
    began_at = training.state.step
    while not training.finished:
        try:
            if stop():
                raise StopRequested
            advance(training)
        except StopRequested:
            save_checkpoint(training)
            raise Interrupted from None
        if training.state.step % order.spec.save_every == 0 and training.state.step > began_at:
            save_checkpoint(training)
    save_checkpoint(training)
    files = models.save(training.model, tokenizer_of(order), run.model)
    reporter.event("saved", f"Model saved in {len(files)} files.", files=list(files))
    training.samples.close()
    return Outcome(
        files=files,
        steps=training.state.step,
        first_loss=training.state.first_loss,
        final_loss=training.state.loss,
        trained_tokens=training.state.trained_tokens,
        effective_batch_size=order.spec.effective_batch_size,
    )


def start(run: RunDirectory, order: Order, reporter: Reporter, stop: Stop) -> Training:
    """Loads model and data, and resumes from the newest checkpoint that is whole."""
    spec, plan = order.spec, order.plan
    device = models.device_of(plan)
    model, tokenizer = models.load(order)
    prepared = prepare(spec.data, Path(order.data_file), tokenizer, run.data)
    samples = Samples(run.data)
    model.to(device)
    optimizer = make_optimizer(spec.optimizer, model.parameters())
    state = _resume(run, model, optimizer, reporter)
    scale = (
        LossScale(state.loss_scale or FIRST_FP16_SCALE, good_windows=state.loss_scale_good_windows)
        if plan.precision == "fp16"
        else None
    )
    clipping = Clipping(spec.gradient_clipping, spec.clip_mode)
    training = Training(
        order=order,
        run=run,
        reporter=reporter,
        stop=stop,
        device=device,
        model=model,
        optimizer=optimizer,
        window=Window(model.parameters(), optimizer, clipping, scale),
        loss_scale=scale,
        samples=samples,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        steps_total=spec.steps_for(len(samples)),
        state=state,
        cut=TokenBudget(tokens=state.token_budget) if state.token_budget else plan.cut,
    )
    _tell_start(training, prepared)
    return training


def advance(training: Training) -> None:
    """One window: trained, applied if it is finite, reported, and left behind."""
    spec, state, at = training.order.spec, training.state, training.cursor
    window = training.next_window()
    targets = int(training.samples.targets[window].sum())
    rate = spec.optimizer.learning_rate * rate_factor(spec.schedule, state.step, training.steps_total)
    set_rate(training.optimizer, rate)
    trained = train_window(training, window, targets) if targets else None
    following = after(at, len(window), len(training.samples))
    state.epoch, state.consumed = following.epoch, following.consumed
    state.micro_step += len(trained.groups) if trained else 0
    if trained is None or not trained.closed.applied:
        _skip(training, window, trained)
    else:
        _count(state, trained.closed, targets)
        training.reporter.step(_log_line(training, at, window, trained, targets, rate))


def train_window(training: Training, window: Indices, targets: int) -> Trained:
    """Forward and backward of every micro-batch, and one optimizer step if the sum is finite.

    The window is replayed as a whole, from the same random state, after an fp16 overflow (at half the
    loss scale) and after running out of memory (in smaller micro-batches).
    """
    lengths = training.samples.lengths[window]
    by_length = training.order.spec.clip_mode != "each_micro_batch"
    while True:
        groups = cut_window(lengths, training.cut, by_length=by_length)
        began = time.perf_counter()
        data_seconds, padded_tokens = 0.0, 0
        seed_window(training.order.spec.seed, training.cursor)
        training.window.open(denominator=targets)
        try:
            for group in groups:
                if training.stop():
                    training.window.abandon()
                    raise StopRequested
                fetched = time.perf_counter()
                batch = training.fetch(window[group].tolist())
                padded_tokens += batch.input_ids.numel()
                data_seconds += time.perf_counter() - fetched
                training.window.add(training.loss(batch))
        except torch.OutOfMemoryError:
            _shrink(training, groups, lengths)
            continue
        closed = guards.close(training.window)
        if not closed.overflow:
            return Trained(closed, groups, padded_tokens, data_seconds, time.perf_counter() - began)
        training.reporter.event("overflow", "fp16 overflow: the window is replayed at half the loss scale.")


def seed_window(seed: int, cursor: Cursor) -> None:
    """Seeds dropout from the place in the data: a resume or a replay sees what the first run saw."""
    mixed = np.random.SeedSequence([seed, cursor.epoch, cursor.consumed]).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed[0]) >> 1)


def save_checkpoint(training: Training) -> None:
    """Writes a checkpoint, and says so once it and the log before it are on the disk."""
    if training.loss_scale is not None:
        training.state.loss_scale = training.loss_scale.value
        training.state.loss_scale_good_windows = training.loss_scale.good_windows
    training.reporter.sync()
    path = checkpoint.save(training.run.checkpoints, training.state, training.model, training.optimizer)
    training.reporter.event(
        "checkpoint", f"Checkpoint at step {training.state.step}.", step=training.state.step, name=path.name
    )


def tokenizer_of(order: Order) -> Any:
    """The base model's tokenizer, to lie beside the trained weights."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(order.model_path, trust_remote_code=False)


def _resume(
    run: RunDirectory, model: Any, optimizer: torch.optim.Optimizer, reporter: Reporter
) -> TrainingState:
    try:
        state, damaged = checkpoint.restore(run.checkpoints, model, optimizer)
    except checkpoint.AllDamaged as error:
        message = f"every checkpoint is damaged ({error}): look at the disk, and submit the job again"
        raise CannotTrain("checkpoints_damaged", message) from None
    for name in damaged:
        message = f"Checkpoint {name} is damaged and was passed over."
        reporter.event("checkpoint_damaged", message, "warning")
    if state is None:
        return TrainingState()
    reporter.event("resumed", f"Resumed at step {state.step}.", step=state.step, epoch=state.epoch,
                   samples=state.consumed)  # fmt: skip
    return state


def _tell_start(training: Training, prepared: Prepared) -> None:
    """What will be trained, on what, and how: the banner of the log."""
    spec, plan = training.order.spec, training.order.plan
    notes = prepared.notes(spec.data.max_length)
    training.reporter.event(
        "data",
        f"{prepared.samples} samples, {prepared.tokens} tokens, the longest {prepared.longest}"
        + (f"; {', '.join(notes)}." if notes else "."),
        "warning" if notes else "info",
        **asdict(prepared),
    )
    training.reporter.event(
        "training",
        f"{training.steps_total} steps of effective batch {spec.effective_batch_size} on {plan.device} in "
        f"{plan.precision}; {spec.optimizer.name}, learning rate {spec.optimizer.learning_rate:g}, "
        f"{warmup_of(spec.schedule, training.steps_total)} warmup steps, {spec.schedule.name}; "
        f"predicted memory {plan.devices[0].predicted_peak_bytes / memory.GIB:.2f} GiB.",
        steps_total=training.steps_total,
        cut=training.cut.model_dump(),
        parameters=sum(p.numel() for p in training.model.parameters()),
        threads=plan.threads,
    )


def _log_line(
    training: Training, at: Cursor, window: Indices, trained: Trained, targets: int, rate: float
) -> LogLine:
    """The step that was just made, as the log has it."""
    spec, state, closed = training.order.spec, training.state, trained.closed
    tokens = int(training.samples.lengths[window].sum())
    return LogLine(
        attempt=training.order.attempt,
        step=state.step,
        micro_step=state.micro_step,
        batch_idx=at.consumed // spec.effective_batch_size,
        epoch=at.epoch,
        samples=len(window),
        loss=closed.loss,
        loss_ema=state.loss_ema or 0.0,
        gradient_accumulation_steps=len(trained.groups),
        effective_batch_size=spec.effective_batch_size,
        physical_batch_size=max(map(len, trained.groups)),
        learning_rate=rate,
        grad_norm=closed.grad_norm,
        tokens=targets,
        input_tokens=tokens,
        padded_tokens=trained.padded_tokens,
        tokens_per_second=tokens / trained.seconds,
        memory_gb=memory.in_use_gb(training.device) if spec.log_memory_usage else None,
        peak_gb=memory.peak_gb(training.device) if spec.log_memory_usage else None,
        noise_scale=None,
        skipped=state.skipped,
        time=time.time(),
        data_seconds=trained.data_seconds,
        forward_backward_seconds=trained.seconds - trained.data_seconds - closed.optimizer_seconds,
        optimizer_seconds=closed.optimizer_seconds,
    )


def _count(state: TrainingState, closed: Closed, targets: int) -> None:
    state.step += 1
    state.skipped_in_a_row = 0
    state.trained_tokens += targets
    state.first_loss = closed.loss if state.first_loss is None else state.first_loss
    state.loss = closed.loss
    state.loss_ema = closed.loss if state.loss_ema is None else (1 - EMA) * state.loss_ema + EMA * closed.loss


def _skip(training: Training, window: Indices, trained: Trained | None) -> None:
    """Counts a window that made no step, names the samples at fault, and gives up after too many."""
    training.state.skipped += 1
    if trained is None:
        message, named = "A window without a single target token made no step.", window.tolist()
    else:
        training.state.skipped_in_a_row += 1
        named = guards.samples_at_fault(
            training.window,
            lambda sample: training.loss(training.fetch([sample])),
            window,
            training.samples.targets,
        )
        message = (
            "A window was not applied: its loss or gradient is not finite; samples at fault: "
            f"{', '.join(map(str, named)) or 'none alone'}."
        )
    training.reporter.event("skipped", message, "warning", samples=named, skipped=training.state.skipped)
    guards.give_up_after_too_many(training.state.skipped_in_a_row)


def _shrink(training: Training, groups: Groups, lengths: Indices) -> None:
    """Takes a smaller token budget after running out of memory; the effective batch stays."""
    training.window.abandon()
    torch.cuda.empty_cache()
    tokens = guards.smaller_budget(groups, lengths, allowed=training.order.spec.auto_adjust_batch_size)
    training.state.token_budget = tokens
    training.cut = TokenBudget(tokens=tokens)
    training.reporter.event(
        "out_of_memory",
        f"Out of memory: the window is replayed with at most {tokens} tokens a micro-batch.",
        "warning",
        token_budget=tokens,
    )
