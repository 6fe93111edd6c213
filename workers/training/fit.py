"""The run, top to bottom: load, resume, certify, then window after window until the steps are made."""

from math import isfinite
from pathlib import Path

import numpy as np
import torch

from app.contract.fail_points import fail_point
from app.contract.order import Order
from app.contract.plan import TokenBudget
from app.contract.reports import Outcome
from workers.run_directory import Reporter, RunDirectory
from workers.training import (
    certificate,
    checkpoint,
    completions,
    evaluation,
    guards,
    noise_scale,
    profile,
    ramp,
    sweep,
)
from workers.training import model as models
from workers.training.accumulate import StopRequested, Trained, add, train_window
from workers.training.batches import after, tokens_of
from workers.training.faults import Interrupted
from workers.training.optimizer import set_rate
from workers.training.report import log_line, tell_start
from workers.training.schedule import rate_factor
from workers.training.start import Indices, Stop, Training, start
from workers.training.trackers import Trackers

EMA = 0.1
"""Weight of the newest loss in the moving average."""


def fit(run: RunDirectory, order: Order, reporter: Reporter, stop: Stop) -> Outcome:
    """Trains what the order says, from the last checkpoint if there is one, and saves the model.

    Raises:
        CannotTrain: the job cannot be trained as it stands.
        Interrupted: told to stop; a checkpoint was written.
    """
    with Trackers(order.spec.report_to, order, run.path) as trackers:
        training, prepared = start(run, order, reporter, trackers, stop)
        tell_start(training, prepared)
        try:
            certificate.certify(training)
            if order.spec.tune == "only":
                return measure(training)
            completions.before(training)
            train(training)
        except StopRequested:
            save_checkpoint(training)
            raise Interrupted from None
        finally:
            training.loader.shutdown(cancel_futures=True)
        return finish(training)


def measure(training: Training) -> Outcome:
    """The first steps, and the sweep over micro-batches that they warm up: no model comes of it.

    Raises:
        StopRequested: told to stop meanwhile.
    """
    state = training.state
    while state.step < sweep.AFTER_STEPS:
        if training.stop():
            raise StopRequested
        advance(training)
    tuning = sweep.sweep(training)
    sweep.settle(training, tuning)
    training.close()
    return Outcome(
        files=(),
        steps=state.step,
        first_loss=state.first_loss,
        final_loss=state.loss,
        trained_tokens=state.trained_tokens,
        effective_batch_size=training.order.spec.effective_batch_size,
        equivalence_error=state.equivalence_error,
        tuning=tuning,
    )


def train(training: Training) -> None:
    """Window after window, with the evaluations and checkpoints that fall due between them."""
    spec, state = training.order.spec, training.state
    saved_at = state.step
    _evaluate_if_due(training)  # the one that an interruption cut short
    while not training.finished:
        if training.stop():
            raise StopRequested
        if state.step and training.run.is_to_finish():
            _stop_early(training)
            break
        if spec.tune is not None and not state.tuned and state.step >= sweep.AFTER_STEPS:
            sweep.settle(training, sweep.sweep(training))
        advance(training)
        _evaluate_if_due(training)
        if state.step % spec.save_every == 0 and state.step > saved_at:
            save_checkpoint(training)
            saved_at = state.step
    if training.validation is not None and state.evaluated_at != state.step:
        evaluate(training)
    save_checkpoint(training)


def _stop_early(training: Training) -> None:
    """Somebody wants the model as it is by now."""
    training.state.stopped_early = True
    message = f"Stopped as requested at step {training.state.step} of {training.steps_total}."
    training.reporter.event("stopped_early", message)


def _evaluate_if_due(training: Training) -> None:
    every, state = training.order.spec.eval_every, training.state
    if every is not None and state.step % every == 0 and state.step > max(0, state.evaluated_at):
        evaluate(training)


def advance(training: Training) -> None:
    """One window: trained, applied if it is finite, reported, and left behind."""
    spec, state, at = training.order.spec, training.state, training.cursor
    window = training.next_window()
    batch = ramp.batch_now(spec, state)
    denominator = training.samples.denominator(window)
    rate = spec.optimizer.learning_rate * rate_factor(spec.schedule, state.step, training.steps_total)
    set_rate(training.optimizer, rate)
    if denominator == 0.0:
        trained = None
    elif spec.profile and state.step == profile.AT_STEP - 1:
        trained = _profiled(training, window, denominator)
    else:
        trained = train_window(training, window, denominator)
    following = after(at, len(window), len(training.samples))
    index = state.windows_in_epoch
    state.windows_in_epoch = index + 1 if following.epoch == at.epoch else 0
    state.epoch, state.consumed = following.epoch, following.consumed
    state.micro_step += len(trained.groups) if trained else 0
    if trained is None or not trained.closed.applied:
        _skip(training, window, trained)
    else:
        _count(training, window, trained)
        noise = noise_scale.estimate(state.noise)
        line = log_line(training, at, index, window, trained, batch, rate, noise)
        ramp.follow(spec, state, noise if trained.measurement else None)
        training.reporter.step(line)
        training.trackers.step(line)


def evaluate(training: Training) -> None:
    """The validation loss at this step; the best step's checkpoint is kept.

    Raises:
        StopRequested: told to stop meanwhile.
    """
    if training.validation is None:
        return

    def between() -> None:
        if training.stop():
            raise StopRequested

    spec, state = training.order.spec, training.state
    loss = None
    tokens = min(_budget(training), spec.effective_batch_size * int(training.validation.lengths.max()))
    while loss is None:
        try:
            loss = evaluation.validation_loss(
                training.token_loss, training.model, training.validation, training.form,
                tokens, training.device, training.autocast, between,
            )  # fmt: skip
        except RuntimeError as error:
            if not guards.is_out_of_memory(error) or tokens == 1:
                raise
            tokens //= 2
    if not isfinite(loss):
        message = f"The validation loss at step {state.step} is no number: it is passed over."
        training.reporter.event("evaluation", message, "warning", step=state.step, loss=None, best=False)
        state.evaluated_at = state.step
        return
    better = evaluation.note(state, loss, spec.early_stopping)
    training.reporter.event(
        "evaluation",
        f"Validation loss {loss:.4f} at step {state.step}{', the best so far' if better else ''}.",
        step=state.step,
        loss=loss,
        best=better,
    )
    training.trackers.write(state.step, {"validation/loss": loss})
    if better:
        checkpoint.mark_as_best(training.run.checkpoints, state)
        save_checkpoint(training)
    if state.stopped_early:
        training.reporter.event(
            "stopped_early",
            f"Stopped at step {state.step}: {state.evaluations_without_gain} evaluations without enough "
            f"gain; the lowest validation loss is {state.best_loss:.4f} at step {state.best_step}.",
        )


def finish(training: Training) -> Outcome:
    """Saves the model (with early stopping, the best one) and says how the run ended."""
    order, state = training.order, training.state
    best = checkpoint.best(training.run.checkpoints) if order.spec.early_stopping else None
    if best is not None and state.best_step != state.step:
        checkpoint.load_weights(best, training.model)
        state.eval_loss = state.best_loss
        message = f"The model of step {state.best_step} is saved, which has the lowest validation loss."
        training.reporter.event("best", message)
    noise = noise_scale.estimate(state.noise)
    if noise is not None:
        band = f"{noise.low:.0f} to {noise.high:.0f}" if noise.high is not None else f"above {noise.low:.0f}"
        message = f"Gradient noise scale {noise.value:.0f} samples (90 % band: {band})."
        training.reporter.event("noise_scale", message, **noise.model_dump())
    completions.after(training)
    fail_point("trainer.saving")
    tokenizer = models.load_tokenizer(training.base)  # as it was before it was used
    files = models.save(
        training.model, tokenizer, training.run.model, order.spec.method, order.spec.model.name
    )
    fail_point("trainer.saved")
    training.reporter.event("saved", f"Model saved in {len(files)} files.", files=list(files))
    training.close()
    return Outcome(
        files=files,
        steps=state.step,
        first_loss=state.first_loss,
        final_loss=state.loss,
        trained_tokens=state.trained_tokens,
        effective_batch_size=order.spec.effective_batch_size,
        eval_loss=state.eval_loss,
        best_step=state.best_step,
        equivalence_error=state.equivalence_error,
        noise_scale=noise,
    )


def save_checkpoint(training: Training) -> Path:
    """Writes a checkpoint, and says so once it and the log before it are on the disk."""
    if training.loss_scale is not None:
        training.state.loss_scale = training.loss_scale.value
        training.state.loss_scale_good_windows = training.loss_scale.good_windows
    training.reporter.sync()
    path = checkpoint.save(training.run.checkpoints, training.state, training.model, training.optimizer)
    if path.name != training.saved:
        training.saved = path.name
        training.reporter.event(
            "checkpoint",
            f"Checkpoint at step {training.state.step}.",
            step=training.state.step,
            name=path.name,
        )
    return path


def _profiled(training: Training, window: Indices, denominator: float) -> Trained:
    folder = training.run.path / "profile"
    trained, seconds = profile.profiled(
        folder, training.device, lambda: train_window(training, window, denominator)
    )
    shares = ", ".join(f"{phase} {value:.4g} s" for phase, value in seconds.items())
    training.reporter.event(
        "profile",
        f"Step {training.state.step + 1} under the profiler: {shares}; the trace is in profile/.",
        seconds=seconds,
        files=sorted(file.name for file in folder.iterdir()),
    )
    return trained


def _budget(training: Training) -> int:
    """Tokens of a micro-batch under the plan as it stands."""
    own = training.cut
    if isinstance(own, TokenBudget):
        return own.tokens
    return training.order.rank.micro_batch_size * int(training.samples.lengths.max())


def _count(training: Training, window: Indices, trained: Trained) -> None:
    """Notes a made step."""
    state, loss = training.state, trained.closed.loss
    state.step += 1
    state.skipped_in_a_row = 0
    state.trained_tokens += int(training.samples.targets[window].sum())
    state.first_loss = loss if state.first_loss is None else state.first_loss
    state.loss = loss
    state.loss_ema = loss if state.loss_ema is None else (1 - EMA) * state.loss_ema + EMA * loss
    state.recent_losses = [*state.recent_losses[1 - guards.RECENT :], loss]
    if trained.measurement is not None:
        state.noise = [*state.noise[1 - noise_scale.HISTORY :], trained.measurement.packed()]
    lengths = training.lengths_of(window)
    largest = max(tokens_of(lengths[group], training.form.packed) for group in trained.groups)
    planned = training.order.rank.micro_batch_rule
    limit = planned.tokens if isinstance(planned, TokenBudget) else None
    larger = guards.learn_larger_budget(state, largest, limit)
    if larger is not None:
        training.reporter.event(
            "token_budget",
            f"{guards.WINDOWS_BEFORE_GROWTH} windows without running out of memory: micro-batches of up to "
            f"{larger} tokens are tried.",
            token_budget=larger,
        )
        training.shrink_buckets()


def _skip(training: Training, window: Indices, trained: Trained | None) -> None:
    """Counts a window that made no step, names the samples at fault, and gives up after too many."""
    state = training.state
    state.skipped += 1
    if trained is None:
        message, named = "A window without a single target token made no step.", window.tolist()
    else:
        state.skipped_in_a_row += 1
        counted = window[training.samples.targets[window] > 0]
        if trained.closed.refused:
            named = _highest_losses(training, counted)
            reason = f"its loss of {trained.closed.loss:.4g} is a spike; the highest losses are of samples"
        else:
            whole = training.samples.denominator(window)
            named = guards.samples_at_fault(
                training.window, lambda s: _add_alone(training, s, whole), counted, training.stop
            )
            reason = "its loss or gradient is not finite; samples at fault:"
        message = f"A window was not applied: {reason} {', '.join(map(str, named)) or 'none alone'}."
    training.reporter.event("skipped", message, "warning", samples=named, skipped=state.skipped)
    guards.give_up_after_too_many(state.skipped_in_a_row)


def _add_alone(training: Training, sample: int, denominator: float) -> None:
    """Opens a window with the whole one's denominator, and adds one of its samples."""
    batch = training.fetch([sample])
    training.window.open(denominator)
    if training.balance is not None:
        training.balance.begin(1)
        if training.balance.scope == "window":
            with training.autocast():
                training.balance.observe(training.token_loss.router_logits(batch), batch)
    add(training, batch)


def _highest_losses(training: Training, window: Indices, count: int = 5) -> list[int]:
    """The samples with the highest mean loss, highest first."""
    sums: list[torch.Tensor] = []
    with torch.no_grad():
        for sample in window.tolist():
            if training.stop():
                return []
            sums.append(training.forward(training.fetch([sample])).loss_sum)
    own = np.array([training.samples.denominator(window[[i]]) for i in range(len(window))])
    means = np.asarray(torch.stack(sums).tolist()) / own
    found: list[int] = window[np.argsort(-means)[:count]].tolist()
    return found
