"""The run, top to bottom: load, resume, certify, then window after window until the steps are made."""

import contextlib
from collections.abc import Sequence
from math import isfinite

from app.contract.assignment import Assignment
from app.contract.reports import Outcome, RankShares, Rewards
from app.contract.spec import MAX_EVALUATIONS
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training import ramp
from workers.training.accumulate import TrainedWindow, train_window
from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.checkpoint_writer import Written
from workers.training.checkpoints.state import Losses, RankTotals
from workers.training.checks import certificate
from workers.training.checks.loss_checks import final_failures
from workers.training.data.batch_loader import Indices
from workers.training.devices import cooling, device_errors, memory
from workers.training.distributed.group import ALONE, Group
from workers.training.exceptions import Interrupted, InterruptionRequested
from workers.training.finish import finish, outcome
from workers.training.gradients import noise_scale
from workers.training.kernels.selection import kernels_until_the_end
from workers.training.micro_batches import first_steps_tuning, trials
from workers.training.micro_batches.batches import tokens_of
from workers.training.micro_batches.budget import WINDOWS_BEFORE_GROWTH
from workers.training.optimizer import set_rate
from workers.training.recovery import guards
from workers.training.recovery.skip import skip
from workers.training.reporting import completions, evaluation, torch_profile
from workers.training.reporting.evaluation import Evaluated, evaluated
from workers.training.reporting.report import log_line, report_start, rewards_of
from workers.training.reporting.trackers import Trackers, named_by_trl
from workers.training.schedule import rate_factor
from workers.training.start import start
from workers.training.training_run import Interruption, TrainingRun

EMA = 0.1
"""Weight of the newest loss in the moving average."""


def fit(
    run: RunDirectory,
    assignment: Assignment,
    reporter: Reporter,
    interrupted: Interruption,
    group: Group = ALONE,
) -> Outcome:
    """Trains what the assignment says, from the last checkpoint if there is one, and saves the model.

    Every rank of a group calls it; rank 0 writes what is written.

    Raises:
        CannotTrain: the job cannot be trained as it stands.
        Interrupted: an interruption was requested; if training had begun, a checkpoint was written.
    """
    with Trackers(assignment.spec.report_to if group.leads else (), assignment, run.path) as trackers:
        try:
            training, prepared = start(run, assignment, reporter, trackers, interrupted, group)
        except RuntimeError as error:
            if not device_errors.is_out_of_memory(error):
                raise
            raise device_errors.start_out_of_memory_error(assignment.plan) from None
        report_start(training, prepared)
        with kernels_until_the_end(training.replica):
            return _trained(training)


def _trained(training: TrainingRun) -> Outcome:
    """Trains, once everything is loaded.

    Raises:
        CannotTrain, Interrupted: as in `fit`.
    """
    try:
        with final_failures(training.group):
            certificate.certify(training)
        if training.assignment.spec.tune == "only":
            return measure(training)
        if training.group.leads and not training.replica.is_sharded:
            completions.before(training)
        train(training)
    except InterruptionRequested:
        save_checkpoint(training)
        finish_checkpoints(training)
        raise Interrupted from None
    finally:
        with contextlib.suppress(OSError):  # it must not replace an error that is being raised
            _report_checkpoints(training, training.checkpoints.wait())
        training.checkpoints.close()
        training.loader.executor.shutdown(cancel_futures=True)
    return finish(training)


def measure(training: TrainingRun) -> Outcome:
    """Makes the first steps as a warm-up, then measures micro-batch sizes. Saves no model.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    state = training.state
    while state.step < first_steps_tuning.AFTER_STEPS:
        if training.any_interruption():
            raise InterruptionRequested
        advance(training)
    tuning = first_steps_tuning.measure_sizes(training)
    first_steps_tuning.apply(training, tuning)
    return outcome(training, files=(), tuning=tuning)


def train(training: TrainingRun) -> None:
    """Trains window after window, with the evaluations and checkpoints that are due between them."""
    spec, state = training.assignment.spec, training.state
    saved_at = state.step
    memory.begin_steps(training.replica.device)  # the peak of loading and of the checks is not a step's
    _evaluate_if_due(training)  # repeats an evaluation that was interrupted
    while not training.finished:
        interrupted, finish, is_hot = training.group.any(
            training.interrupted(),
            training.run.finish_requested(),
            training.run.why_cooling_down() is not None,
        )
        if interrupted:
            raise InterruptionRequested
        if state.step and finish:
            _stop_early(training)
            break
        if is_hot and not finish:
            cooling.wait_until_cool(training)
            continue
        measured = all(budget.learned.measured for budget in training.budgets)
        if spec.tune == "first" and not measured and state.step >= first_steps_tuning.AFTER_STEPS:
            first_steps_tuning.apply(training, first_steps_tuning.measure_sizes(training))
        if not state.step and state.progress.skipped:  # no window so far had a gradient to compare
            with final_failures(training.group):
                certificate.certify(training)
        advance(training)
        _report_checkpoints(training, training.checkpoints.written())
        _evaluate_if_due(training)
        if state.step % spec.save_every == 0 and state.step > saved_at:
            save_checkpoint(training)
            saved_at = state.step
    if training.loader.validation is not None and state.evaluations.at_step != state.step:
        evaluate(training)
    save_checkpoint(training)
    finish_checkpoints(training)


def _stop_early(training: TrainingRun) -> None:
    """Ends training early, since a user has requested the model as it is now."""
    progress = training.state.progress
    progress.stopped_early = progress.stop_requested = True
    message = f"Stopped as requested at step {training.state.step} of {training.steps_total}."
    training.reporter.event("stopped_early", message)


def _evaluate_if_due(training: TrainingRun) -> None:
    every, state = training.assignment.spec.eval_every, training.state
    if every is not None:  # a job whose length depends on its tokenizer was not checked at submission
        every = max(every, -(-training.steps_total // MAX_EVALUATIONS))
    if every is not None and state.step % every == 0 and state.step > max(0, state.evaluations.at_step):
        evaluate(training)


def advance(training: TrainingRun) -> None:
    """Trains one window, applies it if it is finite, reports it, and moves on to the next."""
    spec, state, samples = training.assignment.spec, training.state, training.loader.samples
    at, index, batch = state.position.cursor, state.position.windows_in_epoch, training.batch
    window = training.next_window()
    denominator = samples.denominator(window)
    rate = spec.optimizer.learning_rate * rate_factor(spec.schedule, state.step, training.steps_total)
    set_rate(training.replica.optimizer, rate)
    if denominator == 0.0:
        trained = None
    elif spec.profile and state.step == torch_profile.AT_STEP - 1 and training.group.leads:
        trained = _profiled(training, window, denominator)
    else:
        with training.run.on_trial() if training.tuner.is_on_trial else contextlib.nullcontext():
            trained = train_window(training, window, denominator)
    state.position.advance(len(window), len(samples))
    state.progress.micro_step += len(trained.groups) if trained else 0
    if trained is None or not trained.result.applied:
        skip(training, window, trained)
    else:
        _record_step(training, window, trained)
        noise = noise_scale.estimate(state.noise)
        line = log_line(training, at, index, window, trained, batch, rate, noise)
        ramp.update(spec, state, noise if trained.measurement else None)
        training.reporter.step(line)
        training.trackers.step(line)


def evaluate(training: TrainingRun) -> None:
    """Computes the validation loss at this step, and keeps the checkpoint of the best step.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    spec, state = training.assignment.spec, training.state
    if training.loader.validation is None:
        return
    found = evaluated(training)
    rewards = rewards_of(training, found.measured)
    better = evaluation.record(state, found, spec.early_stopping, rewards)
    if isfinite(found.loss):
        _report_evaluation(training, found, rewards, better=better)
    else:
        message = f"The validation loss at step {state.step} is not finite."
        training.reporter.event(
            "evaluation", message, "warning", step=state.step, loss=None, token_accuracy=None, best=False
        )
    if training.group.leads and not training.replica.is_sharded and isfinite(found.loss):
        completions.at_evaluation(training)
    if better:
        save_checkpoint(training)
    own, early_stopping = state.evaluations, spec.early_stopping
    if early_stopping is not None and own.without_gain >= early_stopping.patience:
        lowest = "none was finite"
        if own.best_loss is not None:
            lowest = f"the lowest validation loss is {own.best_loss:.4f} at step {own.best_step}"
        training.reporter.event(
            "stopped_early",
            f"Stopped at step {state.step}: {own.without_gain} evaluations without enough improvement; "
            f"{lowest}.",
        )


def _report_evaluation(
    training: TrainingRun, found: Evaluated, rewards: Rewards | None, *, better: bool
) -> None:
    """Reports a validation loss as an event and to the trackers."""
    spec, state, loss = training.assignment.spec, training.state, found.loss
    accuracy, exact = (found.correct, found.exact) if rewards is None else (None, None)
    training.reporter.event(
        "evaluation",
        f"Validation loss {loss:.4f} at step {state.step}{', the best so far' if better else ''}"
        f"{_what_is_right(found, rewards, classifies=bool(spec.data.classes))}.",
        step=state.step,
        loss=loss,
        token_accuracy=accuracy,
        exact_match=exact,
        rewards=None if rewards is None else rewards.model_dump(),
        best=better,
    )
    tracked = {"validation/loss": loss}
    if accuracy is not None and exact is not None:
        tracked |= {"validation/token_accuracy": accuracy, "validation/exact_match": exact}
    training.trackers.write(state.step, tracked | named_by_trl(rewards, "validation/"))


def _what_is_right(found: Evaluated, rewards: Rewards | None, *, classifies: bool) -> str:
    """The end of a sentence on an evaluation: what the model gets right."""
    if classifies:
        return f"; {found.correct:.1%} of the texts are classified correctly"
    if rewards is None:
        whole = f", and every token of {found.exact:.1%} of the samples" if found.exact else ""
        return f"; {found.correct:.1%} of the tokens are predicted correctly{whole}"
    if rewards.accuracy is not None:
        return f"; in {rewards.accuracy:.1%} of the pairs, the chosen answer has the higher reward"
    return "" if rewards.margin is None else f"; the mean margin between rewards is {rewards.margin:.3g}"


def save_checkpoint(training: TrainingRun) -> None:
    """Writes a checkpoint, or begins to, and reports it once the checkpoint and the log up to it are on
    disk."""
    state, replica = training.state, training.replica
    if replica.loss_scale is not None:
        state.loss_scale.value = replica.loss_scale.value_before_window
        state.loss_scale.good_windows = replica.loss_scale.good_windows
    content = checkpoint.collect(replica.parameters, replica.optimizer)
    if not training.group.leads:
        training.group.wait()
        return
    training.reporter.sync()
    _report_checkpoints(training, training.checkpoints.write(state, content))
    training.group.wait()


def finish_checkpoints(training: TrainingRun) -> None:
    """Waits for what is being written."""
    _report_checkpoints(training, training.checkpoints.wait())
    training.group.wait()


def _report_checkpoints(training: TrainingRun, written: Sequence[Written]) -> None:
    for step, path in written:
        if path is not None:
            training.reporter.event("checkpoint", f"Checkpoint at step {step}.", step=step, name=path.name)


def _profiled(training: TrainingRun, window: Indices, denominator: float) -> TrainedWindow:
    folder = training.run.path / "profile"
    trained, seconds = torch_profile.profiled(
        folder, training.replica.device, lambda: train_window(training, window, denominator)
    )
    shares = ", ".join(f"{phase} {value:.4g} s" for phase, value in seconds.items())
    training.reporter.event(
        "profile",
        f"Step {training.state.step + 1} under the profiler: {shares}; the trace is in profile/.",
        seconds=seconds,
        files=sorted(file.name for file in folder.iterdir()),
    )
    return trained


def _record_step(training: TrainingRun, window: Indices, trained: TrainedWindow) -> None:
    """Records an applied step."""
    state, loader, loss = training.state, training.loader, trained.result.loss
    state.progress.step += 1
    state.progress.skipped_in_a_row = 0
    state.progress.trained_tokens += int(loader.samples.targets[window].sum())
    _note_loss(state.losses, loss, state.progress.step)
    if trained.measurement is not None:
        state.noise = [*state.noise[1 - noise_scale.HISTORY :], trained.measurement.packed()]
    _record_work(training, trained)
    trials.decide(training, window, trained)
    lengths = loader.lengths(window)
    for rank, (budget, groups) in enumerate(zip(training.budgets, trained.groups_by_rank, strict=True)):
        if not groups:
            continue
        larger = budget.record_fit(max(tokens_of(lengths[own], loader.layout.packed) for own in groups))
        if larger is None:
            continue
        on = f" on rank {rank}" if training.group.size > 1 else ""
        training.reporter.event(
            "token_budget",
            f"{WINDOWS_BEFORE_GROWTH} windows without running out of memory{on}: micro-batches of up to "
            f"{larger} tokens are tried.",
            token_budget=larger,
            rank=rank,
        )
        if rank == training.group.rank:
            loader.limit_buckets(larger)


def _record_work(training: TrainingRun, trained: TrainedWindow) -> None:
    """Adds up what each rank did, and changes the ranks' shares if their speeds differ from those
    expected."""
    state, group, work = training.state, training.group, trained.work
    if group.size == 1:
        return
    state.ranks += [RankTotals() for _ in work[len(state.ranks) :]]
    slowest = max(each.seconds for each in work)
    for totals, own in zip(state.ranks, work, strict=False):
        totals.micro_batches += own.micro_batches
        totals.tokens += own.tokens
        totals.seconds += own.seconds
        totals.idle_seconds += slowest - own.seconds
    shares = training.shares.record_window(state.step, work)
    if shares is None:
        return
    if group.leads:
        training.run.append_shares(RankShares(step=state.step, shares=tuple(shares)))
    percents = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(shares))
    message = f"The ranks' shares of each window now follow their measured speeds: {percents}."
    training.reporter.event("rank_shares", message, step=state.step, shares=shares)


def _note_loss(losses: Losses, loss: float, step: int) -> None:
    """Records a step's loss; its average is the mean of all losses until the newest has the weight `EMA`, so
    that the first loss does not linger."""
    weight = max(EMA, 1.0 / step)
    losses.first = loss if losses.first is None else losses.first
    losses.last = loss
    losses.average = loss if losses.average is None else (1 - weight) * losses.average + weight * loss
    losses.recent = [*losses.recent[1 - guards.RECENT :], loss]
