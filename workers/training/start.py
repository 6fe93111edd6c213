"""Everything that a run needs, put together: model, data, optimizer, window, and where it left off."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.contract.order import Order
from app.contract.plan import FixedCount, MicroBatchRule, TokenBudget
from app.contract.reports import WindowProgress
from workers.run_directory import Reporter, RunDirectory
from workers.training import checkpoint, memory, ramp
from workers.training import model as models
from workers.training.balance import Balance, balance_of
from workers.training.batches import (
    Buckets,
    Cursor,
    Form,
    MicroBatch,
    collate,
    epoch_order,
    window_at,
)
from workers.training.checkpoint import TrainingState
from workers.training.data import Prepared, Samples, held_out, prepare
from workers.training.faults import CannotTrain, Interrupted
from workers.training.gradients import gradients_for
from workers.training.loss import Forward, TokenLoss
from workers.training.loss_checks import keeps_documents_apart, same_loss
from workers.training.optimizer import make_optimizer
from workers.training.trackers import Trackers
from workers.training.window import Clipping, LossScale, Window

FIRST_FP16_SCALE = 65536.0
PROGRESS_EVERY_SECONDS = 1.0

Stop = Callable[[], bool]
Indices = npt.NDArray[np.int64]


@dataclass
class Training:
    """A run in progress: everything that one window needs."""

    order: Order
    run: RunDirectory
    base: Path
    """The folder with the base model's staged files."""
    reporter: Reporter
    trackers: Trackers
    stop: Stop
    device: torch.device
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    window: Window
    loss_scale: LossScale | None
    token_loss: TokenLoss
    balance: Balance | None
    samples: Samples
    validation: Samples | None
    form: Form
    state: TrainingState
    memory: memory.Watch
    loader: ThreadPoolExecutor
    saved: str | None = None
    """The checkpoint that was told of last."""
    _progress_at: float = field(default_factory=time.monotonic)
    _order_of_epoch: tuple[int, Indices] = field(default=(-1, np.empty(0, np.int64)))

    def fetch(self, samples: list[int]) -> MicroBatch:
        """Reads samples from disk into one micro-batch on the device."""
        rows = [self.samples.read(sample) for sample in samples]
        return collate(rows, self.form, self.samples.weights[samples].tolist()).to(self.device)

    def forward(self, batch: MicroBatch) -> Forward:
        """The summed loss of a micro-batch, in the plan's precision."""
        with self.autocast():
            found: Forward = self.token_loss(batch)
            return found

    def autocast(self) -> Any:
        return models.autocast(self.order.plan.precision, self.order.plan.device)

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.state.epoch, self.state.consumed)

    @property
    def cut(self) -> MicroBatchRule:
        """How windows are cut: by the plan, or by the token budget learned since."""
        if self.state.token_budget is not None:
            return TokenBudget(tokens=self.state.token_budget)
        cut, requested = self.order.rank.micro_batch_rule, self.order.spec.effective_batch_size
        grown = ramp.batch_now(self.order.spec, self.state) / requested
        if isinstance(cut, FixedCount) and grown > 1:
            return FixedCount(micro_batches=round(cut.micro_batches * grown))
        return cut

    @property
    def steps_total(self) -> int:
        return ramp.steps_total(self.order.spec, self.state, len(self.samples))

    @property
    def finished(self) -> bool:
        epochs = self.order.spec.epochs
        if self.state.stopped_early:
            return True
        return self.state.epoch >= epochs if epochs is not None else self.state.step >= self.steps_total

    def next_window(self) -> Indices:
        """The samples of the window at the cursor."""
        epoch = self.state.epoch
        if self._order_of_epoch[0] != epoch:
            order = epoch_order(len(self.samples), self.order.spec.seed, epoch)
            self._order_of_epoch = (epoch, order)
        batch = ramp.batch_now(self.order.spec, self.state)
        return window_at(self.cursor, self._order_of_epoch[1], batch)

    def lengths_of(self, window: Indices) -> Indices:
        """Tokens that each sample of a window takes, as they are cut by."""
        lengths = self.samples.lengths[window]
        return self.form.buckets.length(lengths) if self.form.buckets else lengths

    def shrink_buckets(self) -> None:
        """A compiled model's shapes keep within the token budget learned."""
        buckets, budget = self.form.buckets, self.state.token_budget
        if buckets is not None and budget is not None:
            self.form = replace(self.form, buckets=Buckets(min(buckets.tokens, budget), buckets.longest))

    def note_progress(self, accumulation_step: int) -> None:
        """Tells how far the window at hand is, where its begin or the last word on it is a second old."""
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_SECONDS or not self.order.spec.log_accumulation:
            return
        self._progress_at = now
        self.run.write_progress(
            WindowProgress(
                attempt=self.order.attempt,
                step=self.state.step,
                micro_step=self.state.micro_step + accumulation_step,
                accumulation_step=accumulation_step,
            )
        )

    def begin_window(self) -> None:
        self._progress_at = time.monotonic()

    def close(self) -> None:
        self.loader.shutdown()
        self.samples.close()
        if self.validation is not None:
            self.validation.close()


def start(
    run: RunDirectory, order: Order, reporter: Reporter, trackers: Trackers, stop: Stop
) -> tuple[Training, Prepared]:
    """Loads model and data, and resumes from the newest checkpoint that is whole.

    Raises:
        CannotTrain: the job cannot be trained as it stands.
    """
    spec, plan = order.spec, order.plan
    device = models.device_of(plan)
    base = models.staged(order, run)
    model, tokenizer, notes = models.load(order, base)
    for note in notes:
        reporter.event("changed", f"{note[0].upper()}{note[1:]}.", "warning")
    try:
        prepared, samples, validation = _data(run, order, tokenizer, stop)
    except (CannotTrain, Interrupted, OSError, MemoryError):
        raise
    except BaseException as error:  # tokenizers panic with one; its message may be training text
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CannotTrain(
            "data_not_tokenised", f"the model's tokenizer could not read the data ({type(error).__name__})"
        ) from None
    if spec.method.name != "qlora":
        model.to(device)
    host = torch.device("cpu") if spec.use_cpu_offload and device.type == "cuda" else None
    optimizer = make_optimizer(spec.optimizer, model.parameters(), host)
    state = _resume(run, model, optimizer, reporter)
    if state.checkpointing:
        models.recompute_activations(model)
    scale = LossScale(state.loss_scale or FIRST_FP16_SCALE, good_windows=state.loss_scale_good_windows)
    balance = balance_of(model, spec.aux_scope)
    training = Training(
        order=order,
        run=run,
        base=base,
        reporter=reporter,
        trackers=trackers,
        stop=stop,
        device=device,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        window=_window(order, model, optimizer, scale if plan.precision == "fp16" else None),
        loss_scale=scale if plan.precision == "fp16" else None,
        token_loss=TokenLoss(model, smoothing=spec.label_smoothing, routed=balance is not None),
        balance=balance,
        samples=samples,
        validation=validation,
        form=_form(order, tokenizer, balance),
        state=state,
        memory=memory.Watch(device, order.rank.memory_limit_bytes),
        loader=ThreadPoolExecutor(1, thread_name_prefix="loader"),
    )
    training.shrink_buckets()
    _check_loss(training)
    _check_packing(training)
    return training, prepared


def _data(
    run: RunDirectory, order: Order, tokenizer: Any, stop: Stop
) -> tuple[Prepared, Samples, Samples | None]:
    """The tokenised samples to train on, and those to evaluate on."""
    spec = order.spec.data
    taken = held_out(spec, order.spec.seed) if spec.held_out() else None
    source = Path(order.data_file)
    prepared = prepare(spec, source, tokenizer, run.data, None if taken is None else ~taken, stop)
    samples = Samples(run.data)
    if spec.validation is None:
        return prepared, samples, None
    folder = run.data / "validation"
    try:
        if order.validation_file is None:
            prepare(spec, source, tokenizer, folder, taken, stop)
        else:
            own = spec.validation.model_dump(exclude={"share"}) | {"validation": None}
            file = Path(order.validation_file)
            prepare(spec.model_copy(update=own), file, tokenizer, folder, stop=stop)
    except CannotTrain as error:
        raise CannotTrain(error.code, f"validation data: {error}") from None
    return prepared, samples, Samples(folder)


def _window(order: Order, model: Any, optimizer: torch.optim.Optimizer, scale: LossScale | None) -> Window:
    spec = order.spec
    parameters = list(model.parameters())
    return Window(
        parameters,
        optimizer,
        Clipping(spec.gradient_clipping, spec.clip_mode),
        scale,
        gradients=gradients_for(
            parameters,
            in_fp32=spec.accumulate_in_fp32,
            host=torch.device("cpu") if spec.accumulate_gradients_on_cpu else None,
        ),
        layers=models.layers_of(model) if spec.log_gradients else None,
        keep_micro_losses=spec.log_micro_losses,
    )


def _form(order: Order, tokenizer: Any, balance: Balance | None) -> Form:
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    budget = order.rank.micro_batch_size * order.spec.data.max_length
    return Form(
        pad_id=pad_id,
        packed=order.spec.data.packing,
        routed=balance is not None,
        buckets=Buckets(budget, order.spec.data.max_length) if order.spec.compile else None,
    )


def _check_loss(training: Training) -> None:
    """Falls back to the model's own logits where its head alone does not give them."""
    state = training.state
    if training.token_loss.head is None or state.own_logits is False:
        return
    if state.own_logits:
        training.token_loss.head = None
        return
    with training.autocast(), models.without_randomness(training.model):
        error = same_loss(training.model, training.token_loss, training.fetch(_usual(training)[:1]))
    state.own_logits = not error <= models.TOLERANCE[training.order.plan.precision]
    if state.own_logits:
        training.token_loss.head = None
        training.reporter.event(
            "changed",
            f"The model does more to its logits than its output head says (loss differs by {error:.1e}): its "
            "own are taken, whole, which needs more memory.",
            "warning",
            loss_error=error,
        )


def _check_packing(training: Training) -> None:
    """Falls back to padding where the model's attention does not keep packed samples apart."""
    state, padded = training.state, Form(training.form.pad_id, routed=training.form.routed)
    if state.padded and training.form.packed:
        training.form = padded
    if not training.form.packed or state.padded is False:
        return
    rows = [training.samples.read(sample) for sample in _usual(training)]
    with training.autocast(), models.without_randomness(training.model):
        error = keeps_documents_apart(
            training.model,
            collate(rows, training.form).to(training.device),
            collate(rows, padded).to(training.device),
        )
    state.padded = not error <= models.TOLERANCE[training.order.plan.precision]
    if state.padded:
        training.form = padded
        training.reporter.event(
            "changed",
            f"The model's attention does not keep packed samples apart (loss differs by {error:.1e}): they "
            "are padded instead.",
            "warning",
        )


def _usual(training: Training) -> list[int]:
    """Two samples of about median length that have targets (one, where there is no other)."""
    counted = np.flatnonzero(training.samples.targets)
    ordered = counted[np.argsort(training.samples.lengths[counted], kind="stable")]
    middle: list[int] = ordered[len(ordered) // 2 :][:2].tolist()
    return middle


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
