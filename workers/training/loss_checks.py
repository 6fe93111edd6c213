"""Checks with one or two samples that a faster way to compute the loss gives the model's own loss.

If it does not, training falls back to the slower way.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from workers.run_directory import Reporter
from workers.training import model as models
from workers.training.batches import BatchLayout, MicroBatch, collate
from workers.training.distributed.group import Group
from workers.training.loader import Loader
from workers.training.loss import TokenLoss
from workers.training.replica import Replica
from workers.training.state import Fallbacks


def check_head(
    replica: Replica, loader: Loader, fallbacks: Fallbacks, reporter: Reporter, group: Group
) -> None:
    """Falls back to the model's own logits if its head alone does not give the same loss."""
    if replica.token_loss.head is None or fallbacks.own_logits is False:
        return
    if fallbacks.own_logits:
        replica.token_loss.head = None
        return
    with replica.autocast(), models.without_randomness(replica.model):
        error = head_error(replica.token_loss, loader.fetch(_typical_samples(loader)[:1]))
    fallbacks.own_logits = group.from_first(not error <= models.TOLERANCE[replica.precision])
    if fallbacks.own_logits:
        replica.token_loss.head = None
        reporter.event(
            "changed",
            f"The model changes its logits after the output head (loss differs by {error:.1e}), so its own "
            "full logits are used, which needs more memory.",
            "warning",
            loss_error=error,
        )


def check_packing(
    replica: Replica, loader: Loader, fallbacks: Fallbacks, reporter: Reporter, group: Group
) -> None:
    """Falls back to padding if the model's attention does not keep packed samples apart."""
    packed, padded = loader.form, BatchLayout(loader.form.pad_id, routed=loader.form.routed)
    if fallbacks.padded and packed.packed:
        loader.form = padded
    if not loader.form.packed or fallbacks.padded is False:
        return
    rows = [loader.samples.read(sample) for sample in _typical_samples(loader)]
    with replica.autocast(), models.without_randomness(replica.model):
        error = packing_error(
            replica.token_loss,
            collate(rows, packed).to(replica.device),
            collate(rows, padded).to(replica.device),
        )
    fallbacks.padded = group.from_first(not error <= models.TOLERANCE[replica.precision])
    if fallbacks.padded:
        loader.form = padded
        reporter.event(
            "changed",
            f"The model's attention does not keep packed samples apart (loss differs by {error:.1e}): they "
            "are padded instead.",
            "warning",
        )


def _typical_samples(loader: Loader) -> list[int]:
    """Two samples of about median length that have targets (one, where there is no other)."""
    counted = np.flatnonzero(loader.samples.targets)
    ordered = counted[np.argsort(loader.samples.lengths[counted], kind="stable")]
    middle: list[int] = ordered[len(ordered) // 2 :][:2].tolist()
    return middle


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
