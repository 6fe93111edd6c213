"""Checks with one or two samples that a faster way to compute the loss gives the model's own loss."""

from typing import Any

import torch
from torch import Tensor

from workers.training.batches import MicroBatch
from workers.training.loss import TokenLoss


def same_loss(model: Any, chunked: TokenLoss, batch: MicroBatch) -> float:
    """How far the loss by the head taken apart is from that of the model's own logits, relatively."""
    own = TokenLoss(model, chunked=False)
    plain = TokenLoss(model)
    plain.head = chunked.head
    with torch.no_grad():
        expected, found = own(batch).loss_sum, plain(batch).loss_sum
    return _difference(found, expected, batch)


def keeps_documents_apart(model: Any, packed: MicroBatch, padded: MicroBatch) -> float:
    """How far the loss of a packed row is from that of the same samples padded, relatively."""
    loss = TokenLoss(model, chunked=False)
    with torch.no_grad():
        found, expected = loss(packed).loss_sum, loss(padded).loss_sum
    return _difference(found, expected, padded)


def _difference(found: Tensor, expected: Tensor, batch: MicroBatch) -> float:
    """Relative to the loss, or to one nat a token where the loss is smaller: a sum that is almost nothing
    has nothing but rounding in it."""
    least = float(len(batch.targets))
    return float((found.double() - expected.double()).abs() / expected.double().abs().clamp(min=least))
