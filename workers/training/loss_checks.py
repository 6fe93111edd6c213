"""Checks with one or two samples that a faster way to compute the loss gives the model's own loss."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from workers.training.batches import MicroBatch
from workers.training.loss import TokenLoss


def head_error(loss: TokenLoss, batch: MicroBatch) -> float:
    """The relative difference between the loss of the chunked head and that of the model's own logits."""
    with torch.no_grad():
        found = loss(batch).loss_sum
        with _own_logits(loss):
            expected = loss(batch).loss_sum
    return _difference(found, expected, batch)


def packing_error(loss: TokenLoss, packed: MicroBatch, padded: MicroBatch) -> float:
    """The relative difference between the loss of a packed row and that of the same samples when padded."""
    with torch.no_grad(), _own_logits(loss):
        found, expected = loss(packed).loss_sum, loss(padded).loss_sum
    return _difference(found, expected, padded)


@contextlib.contextmanager
def _own_logits(loss: TokenLoss) -> Iterator[None]:
    """Within the block, the loss is computed from the model's own logits."""
    head, loss.head = loss.head, None
    try:
        yield
    finally:
        loss.head = head


def _difference(found: Tensor, expected: Tensor, batch: MicroBatch) -> float:
    """The difference relative to the loss, or to one nat per token if the loss is smaller, since a loss near
    zero consists only of rounding."""
    least = float(len(batch.targets))
    return float((found.double() - expected.double()).abs() / expected.double().abs().clamp(min=least))
