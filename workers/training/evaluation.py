"""The validation loss: a mean over the set's target tokens, and what follows from it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from app.contract.plan import TokenBudget
from app.contract.spec import EarlyStopping
from workers.training.batches import Form, collate, cut_window
from workers.training.checkpoint import TrainingState
from workers.training.data import Samples
from workers.training.loss import TokenLoss


def validation_loss(
    loss: TokenLoss,
    model: Any,
    samples: Samples,
    form: Form,
    tokens: int,
    device: torch.device,
    autocast: Callable[[], Any],
    between: Callable[[], None],
) -> float:
    """Weighted token losses over the set, divided by their weights once. One read from the device.

    Args:
        tokens: at most so many in a micro-batch.
        autocast: makes the context of a forward pass.
        between: called before each micro-batch; may raise to end the evaluation.
    """
    counted = np.flatnonzero(samples.targets)
    total = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for group in cut_window(samples.lengths[counted], TokenBudget(tokens=tokens), packed=form.packed):
                between()
                chosen = counted[group].tolist()
                batch = collate([samples.read(i) for i in chosen], form, samples.weights[chosen].tolist())
                with autocast():
                    total += loss(batch.to(device)).loss_sum
    finally:
        model.train(was_training)
    return total.item() / samples.denominator(counted)


def note(state: TrainingState, loss: float, patience: EarlyStopping | None) -> bool:
    """Notes an evaluation at the present step; whether its loss is the lowest so far.

    The lowest loss is that of the model to keep, however little lower it is. Patience is another matter: it
    is renewed only by a gain of at least `min_delta` over the last loss that renewed it.
    """
    state.eval_loss, state.evaluated_at = loss, state.step
    better = state.best_loss is None or loss < state.best_loss
    if better:
        state.best_loss, state.best_step = loss, state.step
    least = patience.min_delta if patience else 0.0
    if state.gained_loss is None or loss < state.gained_loss - least:
        state.gained_loss, state.evaluations_without_gain = loss, 0
    else:
        state.evaluations_without_gain += 1
    state.stopped_early = patience is not None and state.evaluations_without_gain >= patience.patience
    return better
