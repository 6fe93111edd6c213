"""Checks that the output head alone gives the model's own logits. If not, the model's own are used.

There are two checks. The loss of a sample shows whether the hidden states are the model's own. Constructed
hidden states, of which only one entry is not zero (`head_error`), show exactly what happens to hidden states
afterwards, even what small logits or low precisions would hide.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite

import numpy as np
import torch

from workers.reporter import Reporter
from workers.training.checkpoints.state import Fallbacks
from workers.training.checks.loss_checks import relative_difference, typical_samples
from workers.training.data.batch_loader import Loader
from workers.training.devices import device_errors
from workers.training.distributed.group import Group
from workers.training.exceptions import CannotTrain
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, MicroBatch, collate
from workers.training.models.dropout import without_randomness
from workers.training.models.precision import AUTOCAST, has_low_precision_weights
from workers.training.replica import Replica

_CHECKED_TOKENS = 64
"""The most tokens of the checked sample, so that its full logits fit into memory."""
_TOLERANCE, _TOLERANCE_IN_16_BITS = 1e-5, 1e-2
"""The largest relative error of the loss; and of logits that are scaled or capped, relative to the largest
logit. 16 bits have a precision of 4e-3, and a cap rounds twice."""
_TOLERANCE_OF_SCORES = 1e-3
"""The largest relative error of scores, which are sums of large terms that may cancel."""
_TOLERANCE_IF_PLAIN = 1e-6
"""The largest error of logits that are only multiplied by powers of two, in any precision."""


def check_head(
    replica: Replica, loader: Loader, fallbacks: Fallbacks, reporter: Reporter, group: Group
) -> None:
    """Falls back to the model's own logits if its head alone does not give them."""
    if replica.token_loss.head is None or replica.token_loss.probes or fallbacks.own_logits is False:
        return
    if fallbacks.own_logits:
        replica.token_loss.head = None
        return
    try:
        why = _difference(replica, _beginning_of_a_sample(loader))
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as failure:
        if isinstance(failure, RuntimeError) and device_errors.is_out_of_memory(failure):
            raise
        why = "the head cannot be called by itself"
    reason: str | None = group.broadcast(why)
    fallbacks.own_logits = reason is not None
    if fallbacks.own_logits:
        replica.token_loss.head = None
        reporter.event(
            "changed",
            f"The model's logits are not simply those of its output head ({reason}), so its own full logits "
            "are used, which needs more memory.",
            "warning",
        )


def check_scores(replica: Replica, loader: Loader) -> None:
    """Checks that the score of a sequence is what the model itself gives, and so what its users will see.

    Raises:
        CannotTrain: it is not.
    """
    batch = loader.fetch(typical_samples(loader)[:1])
    first = replace(batch, input_ids=batch.input_ids[:1, : batch.lengths[0]], position_ids=None)
    with replica.autocast(), without_randomness(replica.model), torch.no_grad():
        error = float(replica.token_loss(first, probe_head=True).loss_sum)
    if not error <= (_TOLERANCE_IN_16_BITS if _in_low_precision(replica) else _TOLERANCE_OF_SCORES):
        raise CannotTrain(
            "not_supported",
            "the model's own scores are not those of its last layer at the last token (they differ by "
            f"{error:.1e}): choose a model of another family",
        )


def _difference(replica: Replica, batch: MicroBatch) -> str | None:
    """How the head's logits differ from the model's own; None if they do not. Without autocast, unless the
    model's kernels need it, or ranks exchange parts of the model."""
    with without_randomness(replica.model), torch.no_grad():
        if not replica.is_sharded:
            try:
                low_precision = has_low_precision_weights(replica.model)
                return _difference_of(replica, batch, low_precision=low_precision)
            except RuntimeError as error:
                if device_errors.is_out_of_memory(error):
                    raise
        with replica.autocast():
            return _difference_of(replica, batch, low_precision=_in_low_precision(replica))


def _difference_of(replica: Replica, batch: MicroBatch, *, low_precision: bool) -> str | None:
    loss, head = replica.token_loss, replica.token_loss.head
    assert head is not None
    tolerance = _TOLERANCE_IN_16_BITS if low_precision else _TOLERANCE
    probed = float(loss(batch, probe_head=True).loss_sum)
    if not probed <= (_TOLERANCE_IF_PLAIN if head.is_plain else tolerance):
        return (
            f"they differ by {probed:.1e}"
            if isfinite(probed)
            else "they have another shape, or are not finite"
        )
    found = loss(batch).loss_sum
    with _own_logits(loss):
        expected = loss(batch).loss_sum
    error = relative_difference(found, expected, len(batch.targets))
    return None if error <= tolerance else f"the loss differs by {error:.1e}"


def _in_low_precision(replica: Replica) -> bool:
    return replica.precision in AUTOCAST or has_low_precision_weights(replica.model)


def _beginning_of_a_sample(loader: Loader) -> MicroBatch:
    """The first tokens of a sample of about median length; all of them count, with a weight of 1."""
    tokens = loader.samples.read(typical_samples(loader)[0])[0][:_CHECKED_TOKENS]
    counts = np.ones(len(tokens), np.bool_)
    layout = BatchLayout(loader.layout.pad_id, routed=loader.layout.routed)
    return collate([(tokens, counts)], layout).to(loader.device)


@contextlib.contextmanager
def _own_logits(loss: TokenLoss) -> Iterator[None]:
    """Within the block, the loss is computed from the model's own logits."""
    head, loss.head = loss.head, None
    try:
        yield
    finally:
        loss.head = head
