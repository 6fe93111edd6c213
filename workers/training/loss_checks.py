"""Checks with one or two samples that a faster way to compute the loss gives the model's own loss."""

from typing import Any

import torch
from torch import Tensor

from workers.training.batches import MicroBatch
from workers.training.loss import TokenLoss


def head_error(model: Any, chunked: TokenLoss, batch: MicroBatch) -> float:
    """The relative difference between the loss of the chunked head and that of the model's own logits."""
    own = TokenLoss(model, chunked=False)
    plain = TokenLoss(model)
    plain.head = chunked.head
    with torch.no_grad():
        expected, found = own(batch).loss_sum, plain(batch).loss_sum
    return _difference(found, expected, batch)


def packing_error(model: Any, packed: MicroBatch, padded: MicroBatch) -> float:
    """The relative difference between the loss of a packed row and that of the same samples when padded."""
    loss = TokenLoss(model, chunked=False)
    with torch.no_grad():
        found, expected = loss(packed).loss_sum, loss(padded).loss_sum
    return _difference(found, expected, padded)


def _difference(found: Tensor, expected: Tensor, batch: MicroBatch) -> float:
    """The difference relative to the loss, or to one nat per token if the loss is smaller, since a loss near
    zero consists only of rounding."""
    least = float(len(batch.targets))
    return float((found.double() - expected.double()).abs() / expected.double().abs().clamp(min=least))
