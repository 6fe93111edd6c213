"""The end of a run: saves the model, and says how the run ended."""

from app.contract.fail_points import fail_point
from app.contract.reports import NoiseScale, Outcome, Rewards, Tuning
from workers.training.checkpoints import checkpoint
from workers.training.gradients import noise_scale
from workers.training.models import base_model
from workers.training.models.parameters import Parameters
from workers.training.models.saving import save
from workers.training.recovery import guards
from workers.training.reporting import completions
from workers.training.start import whole_model
from workers.training.training_run import TrainingRun


def finish(training: TrainingRun) -> Outcome:
    """Saves the model (with early stopping, the best one, unless a user has requested the model as it is) and
    returns how the run ended.

    Raises:
        CannotTrain: no window made a step, or no step changed a weight, so that the model is untrained.
    """
    guards.check_any_step(training.state.step)
    model = whole_model(training)
    if not training.group.leads:
        training.group.wait()
        return outcome(training, files=())
    assignment, evaluations = training.assignment, training.state.evaluations
    if not training.state.progress.stopped_early:  # a run that was stopped keeps the model as it is
        guards.check_weights_changed(model, training.run.digest_of_base())
    keeps_best = assignment.spec.early_stopping is not None and not training.state.progress.stop_requested
    has_other_best = keeps_best and evaluations.best_step not in (None, training.state.step)
    best = checkpoint.best(training.run.checkpoints) if has_other_best else None
    if has_other_best and best is None:
        message = (
            f"The checkpoint of step {evaluations.best_step}, which has the lowest validation loss, is "
            f"damaged or missing: saving the model of step {training.state.step}."
        )
        training.reporter.event("checkpoint_damaged", message, "warning")
        evaluations.best_step = None
    elif best is not None:
        checkpoint.load_weights(best, Parameters(model))
        evaluations.loss, evaluations.rewards = evaluations.best_loss, evaluations.best_rewards
        evaluations.token_accuracy = evaluations.best_token_accuracy
        evaluations.exact_match = evaluations.best_exact_match
        message = f"Saving the model of step {evaluations.best_step}, which has the lowest validation loss."
        training.reporter.event("best", message)
    noise = noise_scale.estimate(training.state.noise)
    if noise is not None:
        band = f"{noise.low:.0f} to {noise.high:.0f}" if noise.high is not None else f"above {noise.low:.0f}"
        message = f"Gradient noise scale {noise.value:.0f} samples (90 % confidence interval: {band})."
        training.reporter.event("noise_scale", message, **noise.model_dump())
    if not training.replica.is_sharded:
        completions.after(training)
    fail_point("trainer.saving")
    tokenizer = base_model.load_tokenizer(training.base)  # loaded again, since using a tokenizer changes it
    files = save(
        model,
        tokenizer,
        training.run.model,
        assignment.spec.method,
        *assignment.spec.model.below_adapters(),
    )
    fail_point("trainer.saved")
    training.reporter.event("saved", f"Model saved in {len(files)} files.", files=list(files))
    training.group.wait()
    return outcome(training, files=files, noise=noise)


def outcome(
    training: TrainingRun,
    *,
    files: tuple[str, ...],
    noise: NoiseScale | None = None,
    tuning: Tuning | None = None,
) -> Outcome:
    """Closes the data, and returns how the run ended."""
    training.loader.close()
    state, rewards = training.state, training.state.evaluations.rewards
    return Outcome(
        files=files,
        steps=state.step,
        first_loss=state.losses.first,
        final_loss=state.losses.last,
        trained_tokens=state.progress.trained_tokens,
        effective_batch_size=training.assignment.spec.effective_batch_size,
        eval_loss=state.evaluations.loss,
        eval_token_accuracy=state.evaluations.token_accuracy,
        eval_exact_match=state.evaluations.exact_match,
        eval_rewards=None if rewards is None else Rewards.model_validate(rewards),
        best_step=state.evaluations.best_step,
        equivalence_error=state.fallbacks.equivalence_error,
        noise_scale=noise,
        tuning=tuning,
    )
