"""Checks that a model keeps the samples of a packed row apart. If it does not, they are padded.

It is checked with the two longest samples, and with a row as long as the largest micro-batch: some models
count positions, or divide attention into blocks, over the whole row, which only shows in a long one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.contract.plan import TokenBudget
from app.contract.spec import Spec
from workers.reporter import Reporter
from workers.training.checkpoints.state import Fallbacks
from workers.training.checks.loss_checks import ROUNDING_IN_FP64, relative_difference
from workers.training.data.batch_loader import Indices, Loader
from workers.training.data.preparation import Tokens
from workers.training.devices import device_errors
from workers.training.distributed.group import Group
from workers.training.kernels.attention import heads_repeated
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, collate, cut_window
from workers.training.models.dropout import without_randomness
from workers.training.models.precision import AUTOCAST, copy_in_fp64, has_low_precision_weights
from workers.training.replica import Replica

_ROUNDING_IN_16_BITS = 1e-3
_CHECKED_TOKENS = 997
"""The most tokens of each of the two longest samples; not a multiple of the blocks that models use."""
_MOST_OPERATIONS_IN_FP64 = 5e12
"""The most floating-point operations of a forward pass on the host: about a minute."""
_MOST_WITHOUT_SUSPICION = 1e11
"""Up to this many operations, the check is made in fp64 even if 16 bits show nothing: they hide small
changes."""


TOO_LITTLE_MEMORY = "There is too little memory to check that the model keeps packed samples apart."


class PackingErrors(NamedTuple):
    """What packing changes of a sample's loss, relative to the loss; infinite if the model fails on a packed
    row, or its loss is not finite."""

    mixing: float
    """The change of the last sample's loss if the samples before it in the row are replaced. No rounding: a
    row of the same shape is computed in the same order."""
    difference: float
    """The largest difference of a sample's loss in the row and when padded."""

    def within(self, mixing: float, difference: float) -> bool:
        return self.mixing <= mixing and self.difference <= difference


@dataclass(frozen=True)
class Layouts:
    """The two ways to lay out samples that are compared."""

    packed: BatchLayout
    padded: BatchLayout


def check_packing(
    replica: Replica,
    loader: Loader,
    most_tokens: int,
    most_samples: int,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
) -> None:
    """Falls back to padding if the model does not keep packed samples apart, or fails on packed rows.

    A row that mixes samples changes their gradients far more than their loss, and low precisions hide
    even that small change. So the check is made in the weights' own precision and, if there is any doubt, in
    fp64.

    Args:
        most_tokens: tokens of the largest micro-batch that is planned for any rank.
        most_samples: samples of the largest window.
    """
    layouts = Layouts(loader.layout, replace(loader.layout, packed=False))
    if fallbacks.padded and loader.layout.packed:
        loader.layout = layouts.padded
    if not loader.layout.packed or (fallbacks.padded is False and fallbacks.packed_tokens >= most_tokens):
        return
    fallbacks.padded, fallbacks.packed_tokens = False, most_tokens
    try:
        reason = why_not_packed(replica, loader, layouts, most_tokens, most_samples, group)
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error) or group.size > 1:
            raise
        reason = TOO_LITTLE_MEMORY
    replica.free_memory()
    if reason is not None:
        fallbacks.padded, loader.layout = True, layouts.padded
        reporter.event("changed", f"{reason} So they are padded instead.", "warning")


def most_samples(spec: Spec) -> int:
    """Samples of the largest window of a job."""
    batch = spec.effective_batch_size
    return batch if spec.ramp.name == "constant" else max(batch, spec.ramp.max_effective_batch_size)


def why_not_packed(
    replica: Replica, loader: Loader, layouts: Layouts, most_tokens: int, most_samples: int, group: Group
) -> str | None:
    """Why samples cannot be packed, as a sentence; None if packing changes their loss only by rounding."""
    for samples in _rows_to_check(loader, most_tokens, most_samples):
        own = _why_row_mixes(replica, samples, layouts) if replica.is_sharded or group.leads else None
        reason: str | None = group.broadcast(own)
        if reason is not None:
            tokens = sum(map(len, samples))
            return f"The model does not keep samples apart in a packed row of {tokens:,} tokens: {reason}."
    return None


def _rows_to_check(loader: Loader, most_tokens: int, most_samples: int) -> Iterator[list[Tokens]]:
    """The samples of each row to check: the beginnings of the two longest that may share a micro-batch (one,
    if there is no other); and of a row as long as the largest micro-batch, if that is longer."""
    samples, apart = loader.samples, loader.layout.separate_above
    ordered: Indices = np.argsort(-samples.lengths, kind="stable")
    if apart is not None:
        is_long = samples.lengths[ordered] > apart
        ordered = ordered[is_long] if is_long.sum() > 1 else ordered[~is_long]
    longest = [samples.read(sample)[0][:_CHECKED_TOKENS] for sample in ordered[:2].tolist()]
    yield longest
    row = ordered[fill_row(samples.lengths[ordered], most_tokens, most_samples)]
    if len(row) > 1 and samples.lengths[row].sum() > sum(map(len, longest)):
        yield [samples.read(sample)[0] for sample in row.tolist()]


def fill_row(lengths: Indices, most_tokens: int, most_samples: int) -> list[int]:
    """Fills a row with samples, the longest that there is room for each time. Returns their positions.

    Args:
        lengths: in descending order.
    """
    chosen: list[int] = []
    position, room = 0, most_tokens
    while len(chosen) < most_samples:
        position += int(np.searchsorted(-lengths[position:], -room))  # the first that is not longer
        if position == len(lengths):
            break
        chosen.append(position)
        room -= int(lengths[position])
        position += 1
    return chosen


def _why_row_mixes(replica: Replica, samples: Sequence[Tokens], layouts: Layouts) -> str | None:
    """Why the samples cannot be packed into a row; None if packing changes their loss only by rounding.

    If memory does not suffice to check a row, half of the row is checked: it is checked in the precision of
    the weights, in which fewer tokens may fit than in training.
    """
    if _scales_by_position_in_row(replica.model, sum(map(len, samples))):
        return "it scales attention by the position in the row"  # which rounding in 16 bits may hide
    try:
        found, rounding = _errors(replica, samples, layouts)
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error) or replica.is_sharded or len(samples) <= 2:
            raise
        found = None  # what failed is freed only after this block
    if found is None:
        replica.free_memory()
        return _why_row_mixes(replica, samples[: (len(samples) + 1) // 2], layouts)
    is_precise = rounding < _ROUNDING_IN_16_BITS
    seems_apart = found.within(ROUNDING_IN_FP64, rounding)
    if seems_apart and (is_precise or _operations(replica, samples) > _MOST_WITHOUT_SUSPICION):
        return None
    exact = _errors_in_fp64(replica, samples, layouts)
    if exact is None and seems_apart:
        return None
    if exact is not None and exact.within(ROUNDING_IN_FP64, ROUNDING_IN_FP64):
        return None
    change = max(exact or found)
    return (
        f"packing changes a sample's loss by {change:.1e}" if isfinite(change) else "it fails on such a row"
    )


def _scales_by_position_in_row(model: Any, tokens: int) -> bool:
    """Whether the model scales attention by a token's position in the row (Llama 4), so that the scale of a
    sample's tokens depends on the samples before it."""
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    step = getattr(text, "floor_scale", None)
    return bool(getattr(text, "attn_temperature_tuning", False)) and step is not None and tokens > step


def _errors(replica: Replica, samples: Sequence[Tokens], layouts: Layouts) -> tuple[PackingErrors, float]:
    """`packing_errors`, and how much rounding may change a loss. Without autocast, unless the model's kernels
    need it, or ranks exchange parts of the model."""

    def errors() -> PackingErrors:
        return packing_errors(replica.token_loss, samples, layouts, replica.device)

    with without_randomness(replica.model):
        if not replica.is_sharded:
            kind: Literal["cpu", "cuda"] = "cuda" if replica.device.type == "cuda" else "cpu"
            try:
                with heads_repeated(kind, "fp32"):  # otherwise, attention in fp32 would hold all scores
                    return errors(), _rounding_of_weights(replica)
            except RuntimeError as error:
                if device_errors.is_out_of_memory(error):
                    raise
        with replica.autocast():
            low_precision = replica.precision in AUTOCAST
            return errors(), _ROUNDING_IN_16_BITS if low_precision else _rounding_of_weights(replica)


def _errors_in_fp64(replica: Replica, samples: Sequence[Tokens], layouts: Layouts) -> PackingErrors | None:
    """`packing_errors` in fp64 on the host; None if the model cannot be copied or converted, or is too
    large."""
    if replica.is_sharded:
        return None
    if _operations(replica, samples) > _MOST_OPERATIONS_IN_FP64:
        return None
    try:
        loss = TokenLoss(copy_in_fp64(replica.model))
        loss.head = loss.head if replica.token_loss.head is not None else None
        with without_randomness(loss.model):
            return packing_errors(loss, samples, layouts, torch.device("cpu"))
    except (RuntimeError, TypeError, MemoryError):
        return None


def _operations(replica: Replica, samples: Sequence[Tokens]) -> float:
    """Of a forward pass of the samples."""
    weights: int = sum(each.numel() for each in replica.model.parameters())
    return 2.0 * weights * sum(map(len, samples))


def _rounding_of_weights(replica: Replica) -> float:
    """How much rounding may change a loss if the model computes in the precision of its weights."""
    return _ROUNDING_IN_16_BITS if has_low_precision_weights(replica.model) else 1e-6


def packing_errors(
    loss: TokenLoss, samples: Sequence[Tokens], layouts: Layouts, device: torch.device
) -> PackingErrors:
    """How much the loss of samples depends on their being packed.

    Args:
        samples: each sample's tokens; all of them count.

    Raises:
        RuntimeError, LookupError, TypeError, ValueError: the model fails on padded samples, too.
    """

    def losses(samples: Sequence[Tokens], layout: BatchLayout) -> list[Tensor]:
        """The summed loss of each sample of one micro-batch."""
        rows = [(tokens, np.ones(len(tokens), np.bool_)) for tokens in samples]
        with torch.no_grad():
            each = loss(collate(rows, layout).to(device), summed=False).loss_sum
        return [own.double().sum() for own in each.split([len(tokens) - 1 for tokens in samples])]

    lengths = np.array([len(tokens) for tokens in samples])
    budget = TokenBudget(tokens=max(int(lengths.sum()), 2 * int(lengths.max())))
    apart: dict[int, Tensor] = {}
    for group in cut_window(lengths, budget):
        own = losses([samples[position] for position in group], layouts.padded)
        apart.update(zip(group, own, strict=True))
    try:
        together = losses(samples, layouts.packed)
        other = losses([*_with_other_tokens(samples[:-1]), samples[-1]], layouts.packed)
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, RuntimeError) and device_errors.is_transient(error):
            raise
        return PackingErrors(inf, inf)
    targets = (lengths - 1).clip(1).tolist()
    found = PackingErrors(
        relative_difference(other[-1], together[-1], targets[-1]),
        max(relative_difference(together[i], apart[i], targets[i]) for i in range(len(samples))),
    )
    return found if all(map(isfinite, found)) else PackingErrors(inf, inf)


def _with_other_tokens(samples: Sequence[Tokens]) -> list[Tokens]:
    """The same samples with another token in every place."""
    known = np.unique(np.concatenate([*samples, np.array([0, 1], np.int32)]))
    return [known[(np.searchsorted(known, tokens) + 1) % len(known)] for tokens in samples]
