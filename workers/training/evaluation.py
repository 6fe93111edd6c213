"""The validation loss, the accuracy of predictions on held-out samples, and early stopping."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from app.contract.plan import TokenBudget
from app.contract.spec import EarlyStopping
from workers.training import device_errors
from workers.training.batches import BatchLayout, collate, cut_window
from workers.training.data import Samples
from workers.training.distributed.group import ALONE, Group
from workers.training.exceptions import InterruptionRequested
from workers.training.replica import Replica
from workers.training.state import RunState
from workers.training.training_run import TrainingRun


class Evaluated(NamedTuple):
    """What the model does on held-out samples: sums over their target tokens, or means."""

    loss: float
    """In nats per token, if it is a mean."""
    correct: float
    """Target tokens that are the model's most likely next token."""


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
    total = torch.zeros(2, dtype=torch.float64, device=replica.device)
    was_training = replica.model.training
    replica.model.eval()
    try:
        with torch.no_grad():
            groups = cut_window(
                samples.lengths[counted],
                TokenBudget(tokens=tokens),
                packed=layout.packed,
                isolate_above=layout.isolate_above,
            )
            own = groups[group.rank :: group.size]
            missing = -(-len(groups) // group.size) - len(own) if replica.is_sharded else 0
            for number, each in enumerate([*own, *[groups[-1]] * missing]):
                between()
                chosen = counted[each].tolist()
                batch = collate([samples.read(i) for i in chosen], layout, samples.weights[chosen].tolist())
                found = replica.evaluate(batch.to(replica.device))
                if number < len(own):  # otherwise only other ranks have a micro-batch left
                    assert found.correct is not None
                    total += torch.stack([found.loss_sum, found.correct])
    finally:
        replica.model.train(was_training)
    return Evaluated(*total.tolist())


def evaluated(training: TrainingRun) -> Evaluated:
    """The means over the target tokens of held-out samples, of which each rank computes a part; in smaller
    micro-batches if they do not fit.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    group, loader, samples = training.group, training.loader, training.loader.validation
    assert samples is not None
    longest, most = int(loader.samples.lengths.max()), int(samples.lengths.max())
    batch = training.assignment.spec.effective_batch_size
    tokens = min(min(budget.tokens(longest) for budget in training.budgets), batch * most)
    while True:
        own, interruption_requested, failure = Evaluated(0.0, 0.0), False, None
        try:
            own = sums(
                training.replica, samples, training.loader.layout, tokens, training.check_interruption, group
            )
        except InterruptionRequested:
            interruption_requested = True
        except RuntimeError as error:
            if not device_errors.is_out_of_memory(error) or tokens == 1 or training.replica.is_sharded:
                raise
            failure = "out of memory"
        interrupted, failed = group.any(interruption_requested, failure is not None)
        if interrupted:
            raise InterruptionRequested
        if not failed:
            tokens_in_all = samples.denominator(np.flatnonzero(samples.targets))
            return Evaluated(*(whole / tokens_in_all for whole in group.sum(own)))
        tokens //= 2


def record(state: RunState, found: Evaluated, early_stopping: EarlyStopping | None) -> bool:
    """Records an evaluation at the current step. Returns whether its loss is the lowest so far.

    The model with the lowest loss is kept, however small the gain. The patience of early stopping is reset
    only by a gain of at least `min_delta` over the loss that reset it last.
    """
    own, loss = state.evaluations, found.loss
    own.loss, own.token_accuracy, own.at_step = loss, found.correct, state.step
    better = own.best_loss is None or loss < own.best_loss
    if better:
        own.best_loss, own.best_token_accuracy, own.best_step = loss, found.correct, state.step
    least = early_stopping.min_delta if early_stopping else 0.0
    if own.gained_loss is None or loss < own.gained_loss - least:
        own.gained_loss, own.without_gain = loss, 0
    else:
        own.without_gain += 1
    state.progress.stopped_early = early_stopping is not None and own.without_gain >= early_stopping.patience
    return better
