"""Makes a job's result from its independent replicas: the average of their weights, or the best of them."""

import contextlib
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path

import torch
from pydantic import ValidationError

from app.contract.reports import LogLine, Outcome, ReplicaOutcome
from workers.reporter import Reporter, SilentReporter
from workers.run_directory import RunDirectory
from workers.training.checkpoints import checkpoint
from workers.training.distributed.independent import replicas_of
from workers.training.exceptions import CannotTrain, Interrupted, InterruptionRequested
from workers.training.models import base_model
from workers.training.models.parameters import Parameters
from workers.training.models.saving import save
from workers.training.reporting import completions
from workers.training.reporting.evaluation import Evaluated, evaluated
from workers.training.reporting.report import rewards_of
from workers.training.reporting.trackers import Trackers
from workers.training.start import start
from workers.training.training_run import Interruption, TrainingRun


def combine(run: RunDirectory, reporter: Reporter, interrupted: Interruption) -> Outcome:
    """Saves the job's model, and returns how the job ended.

    With `average`, the model has the mean of the replicas' weights, and is evaluated like each of them. The
    mean is taken of what was trained: of LoRA's matrices, not of their product. Otherwise, it is the model of
    the replica with the lowest validation loss, or without validation data, the lowest training loss.

    Raises:
        CannotTrain: all checkpoints of a replica are damaged.
        Interrupted: an interruption was requested.
    """
    assignment = run.assignment()
    replicas = replicas_of(run, assignment)
    outcomes = [_outcome(own) for own in replicas]
    best = min(range(len(outcomes)), key=lambda number: _order(outcomes[number]))
    own = replicas[best].assignment()
    steps = max(each.steps for each in outcomes)
    last_figures = _Collected()
    training, _ = start(replicas[best], own, SilentReporter(own.attempt), last_figures, interrupted)
    if assignment.spec.average:
        _average(training, [final_checkpoint(each) for each in replicas])
    else:
        checkpoint.load_weights(final_checkpoint(replicas[best]), training.replica.parameters)
    found: Evaluated | None = None
    if training.loader.validation is not None:
        try:
            found = evaluated(training)
        except InterruptionRequested:
            raise Interrupted from None
    loss = None if found is None or not isfinite(found.loss) else found.loss
    rewards = None if found is None else rewards_of(training, found.measured)
    if loss is not None:
        last_figures.write(steps, {"validation/loss": loss})
    _report(reporter, outcomes, best, loss, average=assignment.spec.average)
    whole = replace(training, run=run, reporter=reporter, assignment=assignment)
    whole.state.progress.step = steps  # of the job, at which metrics are reported
    _complete_prompts(whole, replicas[0])
    tokenizer = base_model.load_tokenizer(training.base)
    spec = assignment.spec
    below = spec.model.below_adapters()
    files = save(training.replica.model, tokenizer, run.model, spec.method, *below)
    training.loader.close()
    _track(run, reporter, steps, last_figures.figures, interrupted)
    return Outcome(
        files=files,
        steps=steps,
        first_loss=None if spec.average else outcomes[best].first_loss,
        final_loss=None if spec.average else outcomes[best].final_loss,
        trained_tokens=sum(each.trained_tokens for each in outcomes),
        effective_batch_size=spec.effective_batch_size,
        eval_loss=loss,
        eval_token_accuracy=None if found is None or rewards is not None else found.correct,
        eval_exact_match=None if found is None or rewards is not None else found.exact,
        eval_rewards=rewards,
        best_step=None if spec.average else outcomes[best].best_step,
        equivalence_error=max(
            (each.equivalence_error for each in outcomes if each.equivalence_error is not None), default=None
        ),
        replicas=tuple(
            ReplicaOutcome(
                replica=number,
                steps=each.steps,
                final_loss=each.final_loss,
                eval_loss=each.eval_loss,
                trained_tokens=each.trained_tokens,
                files=each.files,
            )
            for number, each in enumerate(outcomes)
        ),
    )


def _outcome(run: RunDirectory) -> Outcome:
    found = run.outcome()
    assert found is not None, "replicas are combined once all have ended"
    return found


def _order(outcome: Outcome) -> tuple[float, float]:
    losses = outcome.eval_loss, outcome.final_loss
    first, second = (inf if loss is None else loss for loss in losses)
    return first, second


def final_checkpoint(run: RunDirectory) -> Path:
    """The checkpoint with a replica's final weights: of its best step with early stopping, unless a user has
    requested the model as it is."""
    newest = checkpoint.newest_whole(run.checkpoints)
    if newest is None:
        message = f"{run.path.name} has no undamaged checkpoint: check the disk, and submit the job again"
        raise CannotTrain("checkpoints_damaged", message)
    keeps_best = run.assignment().spec.early_stopping is not None
    if keeps_best and not checkpoint.state_of(newest).progress.stop_requested:
        return checkpoint.best(run.checkpoints) or newest
    return newest


class _Collected(Trackers):
    """Keeps figures that are to be written later."""

    def __init__(self) -> None:
        self._writers = []
        self.figures: dict[str, float] = {}

    def write(self, step: int, figures: dict[str, float]) -> None:
        self.figures |= figures


def _track(
    run: RunDirectory, reporter: Reporter, steps: int, last: dict[str, float], interrupted: Interruption
) -> None:
    """Writes the job's steps, and the figures of its model, to its trackers. An error is only reported: the
    model is saved already.

    Raises:
        Interrupted: an interruption was requested.
    """
    assignment = run.assignment()
    if not assignment.spec.report_to:
        return
    try:
        with Trackers(assignment.spec.report_to, assignment, run.path) as trackers:
            for line in _last_lines(run):
                if interrupted():
                    raise Interrupted
                trackers.step(line)
            trackers.write(steps, last)
    except Interrupted:
        raise
    except Exception as error:  # whatever a tracker's library raises
        message = f"The job's figures were not written to {', '.join(assignment.spec.report_to)}: "
        reporter.event("trackers", f"{message}{type(error).__name__}.", "warning")


def _last_lines(run: RunDirectory) -> list[LogLine]:
    """The job's log lines by step; of a step that was repeated, the last one."""
    lines = {}
    with run.metrics.open("rb") as log:
        for raw in log:
            with contextlib.suppress(ValidationError):  # a line that was cut off
                line = LogLine.model_validate_json(raw)
                lines[line.step] = line
    return [lines[step] for step in sorted(lines)]


def _complete_prompts(training: TrainingRun, first: RunDirectory) -> None:
    """Completes held-out prompts with the job's model, beside what the base model made of them.

    Args:
        first: replica 0, which completed the prompts before it was trained.
    """
    before = first.completions()
    if before is not None and training.run.completions() is None:
        training.run.write_completions(before)
    completions.after(training)


def _average(training: TrainingRun, checkpoints: list[Path]) -> None:
    """Gives a model the mean of several checkpoints' weights."""
    parameters: Parameters = training.replica.parameters
    sums = {
        name: torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for name, own in parameters.trained.items()
    }
    for path in checkpoints:
        checkpoint.load_weights(path, parameters)
        for name, own in parameters.trained.items():
            sums[name] += own.detach()
    with torch.no_grad():
        for name, own in parameters.trained.items():
            own.copy_(sums[name] / len(checkpoints))


def _report(
    reporter: Reporter, outcomes: list[Outcome], best: int, loss: float | None, *, average: bool
) -> None:
    losses = ", ".join(
        f"replica {number} {_loss(each.eval_loss if each.eval_loss is not None else each.final_loss)}"
        for number, each in enumerate(outcomes)
    )
    what = "validation" if outcomes[best].eval_loss is not None else "last training"
    own = "the average of the replicas' weights" if average else f"that of replica {best}"
    reached = f", with a validation loss of {_loss(loss)}" if average and loss is not None else ""
    message = f"The replicas' {what} losses: {losses}. The job's model is {own}{reached}."
    reporter.event("combined", message, replica=None if average else best, loss=loss)


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
