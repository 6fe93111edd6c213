"""The validation loss and early stopping."""

from collections.abc import Callable

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


def loss_sum(
    replica: Replica,
    samples: Samples,
    layout: BatchLayout,
    tokens: int,
    between: Callable[[], None],
    group: Group = ALONE,
) -> float:
    """This rank's part of the sum of weighted token losses over the set, without label smoothing. Reads the
    device only once.

    Args:
        tokens: the maximum number of tokens in a micro-batch.
        between: called before each micro-batch; may raise to end the evaluation.
        group: the ranks that share the micro-batches.
    """
    counted = np.flatnonzero(samples.targets)
    total = torch.zeros((), dtype=torch.float64, device=replica.device)
    was_training = replica.model.training
    replica.model.eval()
    try:
        with torch.no_grad(), replica.token_loss.without_smoothing():
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
                loss = replica.forward(batch.to(replica.device)).loss_sum
                if number < len(own):  # otherwise only other ranks have a micro-batch left
                    total += loss
    finally:
        replica.model.train(was_training)
    return total.item()


def validation_loss(training: TrainingRun) -> float:
    """The validation loss, of which each rank computes a part; in smaller micro-batches if they do not fit.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    group, loader, samples = training.group, training.loader, training.loader.validation
    assert samples is not None
    longest, most = int(loader.samples.lengths.max()), int(samples.lengths.max())
    batch = training.assignment.spec.effective_batch_size
    tokens = min(min(budget.tokens(longest) for budget in training.budgets), batch * most)
    while True:
        own, interruption_requested, failure = 0.0, False, None
        try:
            own = loss_sum(
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
            (whole,) = group.sum([own])
            return whole / samples.denominator(np.flatnonzero(samples.targets))
        tokens //= 2


def record(state: RunState, loss: float, early_stopping: EarlyStopping | None) -> bool:
    """Records an evaluation at the current step. Returns whether its loss is the lowest so far.

    The model with the lowest loss is kept, however small the gain. The patience of early stopping is reset
    only by a gain of at least `min_delta` over the loss that reset it last.
    """
    own = state.evaluations
    own.loss, own.at_step = loss, state.step
    better = own.best_loss is None or loss < own.best_loss
    if better:
        own.best_loss, own.best_step = loss, state.step
    least = early_stopping.min_delta if early_stopping else 0.0
    if own.gained_loss is None or loss < own.gained_loss - least:
        own.gained_loss, own.without_gain = loss, 0
    else:
        own.without_gain += 1
    state.progress.stopped_early = early_stopping is not None and own.without_gain >= early_stopping.patience
    return better
