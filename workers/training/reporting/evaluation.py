"""The validation loss, the accuracy of predictions on held-out samples, and early stopping."""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from app.contract.plan import TokenBudget
from app.contract.reports import Rewards
from app.contract.spec import EarlyStopping
from workers.training.checkpoints.state import RunState
from workers.training.data.batch_loader import Indices, lay_out
from workers.training.data.preparation import Samples
from workers.training.devices import device_errors
from workers.training.distributed.group import ALONE, Group
from workers.training.exceptions import InterruptionRequested, OtherRankFailed
from workers.training.losses.objectives import MEASURED, Objective
from workers.training.losses.window_scope import tokens_factor
from workers.training.micro_batches.batches import BatchLayout, Groups, cut_window
from workers.training.passes import failing_together, share_of_rank
from workers.training.replica import Replica
from workers.training.training_run import TrainingRun


class Evaluated(NamedTuple):
    """What the model does on held-out samples: sums over their target tokens (with a preference objective,
    over samples), or means."""

    loss: float
    """In nats per token, if it is a mean."""
    correct: float
    """Target tokens that are the model's most likely next token, or pairs that are in the right order."""
    exact: float = 0.0
    """Samples of which every target token is predicted, or their share; 0 with a preference objective."""
    measured: tuple[float, ...] = ()
    """See `Objective.measured`; always sums."""


def sums(
    replica: Replica,
    samples: Samples,
    layout: BatchLayout,
    tokens: int,
    between: Callable[[], None],
    group: Group = ALONE,
) -> Evaluated:
    """This rank's part of the weighted sums over the set, without label smoothing. Reads the device only
    once.

    Args:
        tokens: the maximum number of tokens in a micro-batch.
        between: called before each micro-batch; may raise to end the evaluation.
        group: the ranks that share the micro-batches.
    """
    counted = np.flatnonzero(samples.targets)
    objective = replica.token_loss.objective
    length = 3 if objective is None else 3 + MEASURED
    total = torch.zeros(length, dtype=torch.float64, device=replica.device)
    was_training = replica.model.training
    replica.model.eval()
    try:
        with torch.no_grad():
            groups = cut_window(
                samples.lengths[counted],
                TokenBudget(tokens=tokens),
                packed=layout.packed,
                separate_above=layout.separate_above,
            )
            passes, counting = share_of_rank(groups, group, equally=replica.is_sharded)
            if objective is not None:
                _of_whole_set(objective, replica, samples, layout, counted, passes, counting, between, group)
            for number, each in enumerate(passes):
                between()
                batch = lay_out(samples, counted[each].tolist(), layout)
                found = replica.evaluate(batch.to(replica.device))
                if number < counting:
                    assert found.correct is not None
                    exact = torch.zeros_like(found.loss_sum) if found.exact is None else found.exact
                    numbers = torch.stack([found.loss_sum, found.correct, exact])
                    total += numbers if found.measured is None else torch.cat([numbers, found.measured])
    finally:
        replica.model.train(was_training)
    loss, correct, exact, *measured = total.tolist()
    return Evaluated(loss, correct, exact, tuple(measured))


def _of_whole_set(
    objective: Objective,
    replica: Replica,
    samples: Samples,
    layout: BatchLayout,
    counted: Indices,
    passes: Groups,
    own: int,
    between: Callable[[], None],
    group: Group,
) -> None:
    """Determines what an objective needs to know of all samples, as window_scope.py does for a window.

    Args:
        passes: positions in `counted`, of which the first `own` are this rank's.

    Raises:
        OtherRankFailed: another rank could not do its part.
    """
    objective.tokens_factor = tokens_factor(samples, counted)
    objective.divergence = None
    if objective.spec.name != "kto":
        return
    total = torch.zeros(2, dtype=torch.float64, device=replica.device)
    with failing_together(group, is_sharded=replica.is_sharded):
        for number, each in enumerate(passes):
            between()
            batch = lay_out(samples, counted[each].tolist(), layout, mismatches=True)
            found = replica.divergence(batch.to(replica.device))
            total += found if number < own else 0.0
    objective.set_divergence(total if group.size == 1 else total.new_tensor(group.sum(total.tolist())))


def evaluated(training: TrainingRun) -> Evaluated:
    """The means over the target tokens of held-out samples (with a preference objective, over the samples).
    Each rank computes a part; in smaller micro-batches if they do not fit.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    group, loader, samples = training.group, training.loader, training.loader.validation
    assert samples is not None
    longest, most = int(loader.samples.lengths.max()), int(samples.lengths.max())
    batch = training.assignment.spec.effective_batch_size
    tokens = min(min(budget.tokens(longest) for budget in training.budgets), batch * most)
    measures = training.replica.token_loss.objective is not None
    nothing = Evaluated(0.0, 0.0, 0.0, (0.0,) * MEASURED if measures else ())
    while True:
        own, interruption_requested, failure = nothing, False, None
        try:
            own = sums(
                training.replica, samples, training.loader.layout, tokens, training.check_interruption, group
            )
        except InterruptionRequested:
            interruption_requested = True
        except OtherRankFailed:
            pass  # that rank says below why
        except RuntimeError as error:
            if not device_errors.is_out_of_memory(error) or tokens == 1 or training.replica.is_sharded:
                raise
            failure = "out of memory"
        interrupted, failed = group.any(interruption_requested, failure is not None)
        if interrupted:
            raise InterruptionRequested
        if not failed:
            counted = np.flatnonzero(samples.targets)
            whole = samples.denominator(counted)
            loss, correct, exact, *measured = group.sum([own.loss, own.correct, own.exact, *own.measured])
            return Evaluated(loss / whole, correct / whole, exact / len(counted), tuple(measured))
        tokens //= 2


def record(
    state: RunState, found: Evaluated, early_stopping: EarlyStopping | None, rewards: Rewards | None = None
) -> bool:
    """Records an evaluation at the current step. Returns whether its loss is the lowest so far.

    The model with the lowest loss is kept, however small the gain. The patience of early stopping is reset
    only by a gain of at least `min_delta` over the loss that reset it last. A loss that is not finite is no
    gain, and leaves the last evaluation without figures.
    """
    own, loss = state.evaluations, found.loss
    if not isfinite(loss):
        own.loss = own.token_accuracy = own.exact_match = own.rewards = None
        own.at_step = state.step
        _count_without_gain(state, early_stopping)
        return False
    own.loss, own.at_step = loss, state.step
    own.token_accuracy = found.correct if rewards is None else None
    own.exact_match = found.exact if rewards is None else None
    own.rewards = None if rewards is None else rewards.model_dump()
    better = own.best_loss is None or loss < own.best_loss
    if better:
        own.best_loss, own.best_step = loss, state.step
        own.best_token_accuracy, own.best_rewards = own.token_accuracy, own.rewards
        own.best_exact_match = own.exact_match
    least = early_stopping.min_delta if early_stopping else 0.0
    if own.gained_loss is None or loss < own.gained_loss - least:
        own.gained_loss, own.without_gain = loss, 0
    else:
        _count_without_gain(state, early_stopping)
    return better


def _count_without_gain(state: RunState, early_stopping: EarlyStopping | None) -> None:
    """Counts an evaluation without a gain, and ends the run after too many of them."""
    state.evaluations.without_gain += 1
    if early_stopping is not None and state.evaluations.without_gain >= early_stopping.patience:
        state.progress.stopped_early = True
