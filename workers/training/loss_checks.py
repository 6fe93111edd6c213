"""Checks on one or two samples at the start, that a faster way to reckon the loss gives the model's own."""

from typing import Any

import torch

from workers.training.batches import MicroBatch
from workers.training.loss import TokenLoss


def same_loss(model: Any, chunked: TokenLoss, batch: MicroBatch) -> float:
    """How far the loss by the head taken apart is from that of the model's own logits, relatively."""
    own = TokenLoss(model, chunked=False)
    plain = TokenLoss(model)
    plain.head = chunked.head
    with torch.no_grad():
        expected, found = own(batch).loss_sum, plain(batch).loss_sum
    return float((found.double() - expected.double()).abs() / expected.double().abs())


def keeps_documents_apart(model: Any, packed: MicroBatch, padded: MicroBatch) -> float:
    """How far the loss of a packed row is from that of the same samples padded, relatively."""
    loss = TokenLoss(model, chunked=False)
    with torch.no_grad():
        one, other = loss(packed).loss_sum.double(), loss(padded).loss_sum.double()
    return float((one - other).abs() / other.abs())
