"""Checks with one or two samples before training.

The model must not see the tokens that it predicts. A faster way to compute the loss must give the model's own
loss; if it does not, training falls back to the slower way.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.run_directory import Reporter
from workers.training import guards
from workers.training import model as models
from workers.training.batch_loader import Loader
from workers.training.batches import BatchLayout, MicroBatch, collate
from workers.training.data import Tokens
from workers.training.distributed.group import Group
from workers.training.exceptions import CannotTrain
from workers.training.loss import TokenLoss
from workers.training.model_parts import is_mixture_of_experts
from workers.training.replica import Replica
from workers.training.state import Fallbacks


@contextlib.contextmanager
def final_failures(group: Group) -> Iterator[None]:
    """Turns errors of the model's own code into a final failure: it would fail in the same way in each
    attempt. Errors of memory, of the device and of other ranks are not.

    Raises:
        CannotTrain: the model fails; the message says how.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _fails(error) from error
    except RuntimeError as error:
        if group.size > 1 or guards.may_pass(error):
            raise
        raise _fails(error) from error


def _fails(error: Exception) -> CannotTrain:
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return CannotTrain(
        "model_fails",
        f"the model fails when it is trained on one sample ({type(error).__name__}: {first}): check its "
        "config.json, and that max_length is not more than it can take",
    )


def check_that_it_runs(replica: Replica, loader: Loader) -> None:
    """Runs the model on the longest sample, in training mode: a model whose configuration is impossible fails
    here."""
    samples = loader.samples
    longest = samples.read(int(np.argmax(samples.lengths)))
    rows = BatchLayout(loader.form.pad_id, routed=loader.form.routed)
    try:
        with torch.no_grad(), replica.autocast():
            replica.token_loss(collate([longest], rows).to(replica.device))
    except RuntimeError as error:
        if not guards.is_out_of_memory(error):  # training knows what to do then
            raise


def check_causality(replica: Replica, loader: Loader, group: Group) -> None:
    """Checks that no token's prediction depends on the tokens after it: a model that sees them would learn to
    copy, and padding on the right would change its loss.

    Where a token's experts are computed together with those of other tokens, rounding changes the loss too,
    and in low precisions by more than later tokens may. So if there is any change, the check is repeated in
    fp64, with a copy of the model on the host.

    Raises:
        CannotTrain: it does.
    """
    longest = int(np.argmax(loader.samples.lengths))
    tokens = loader.samples.read(longest)[0][:_CHECKED_TOKENS]
    if len(tokens) < _LEAST_CHECKED_TOKENS:
        return
    rows = BatchLayout(loader.form.pad_id, routed=loader.form.routed)
    with replica.autocast():
        error = _change_by_later_tokens(replica.token_loss, tokens, rows, replica.device)
    tolerance = _IN_FP64
    if group.from_first(error > tolerance):
        exact = _change_in_fp64(replica, tokens, rows)
        error, tolerance = (error, _rounding(replica)) if exact is None else (exact, _IN_FP64)
    error = group.from_first(error)
    if not isfinite(error):
        raise CannotTrain(
            "not_finite", "the model's loss on a sample is not finite: check its config.json and its weights"
        )
    if error > tolerance:
        raise CannotTrain(
            "not_causal",
            "the model's predictions depend on the tokens after them (replacing the later tokens changes the "
            f"loss of the earlier ones by {error:.1e}), so it cannot be trained to predict them: choose a "
            "causal language model",
        )


def _change_by_later_tokens(
    loss: TokenLoss, tokens: Tokens, rows: BatchLayout, device: torch.device
) -> float:
    """How much the loss of the first half of a sample changes, at most, if the second half is replaced:
    relative to that loss."""
    seen = len(tokens) // 2
    counts = np.arange(len(tokens)) < seen
    others = [tokens.copy(), tokens.copy()]
    others[0][seen:] = 0 if (tokens[seen:] != 0).any() else 1
    others[1][seen:] = np.resize(tokens[:seen][::-1], len(tokens) - seen)
    with torch.no_grad(), models.without_randomness(loss.model):
        one, *changed = (
            loss(collate([(each, counts)], rows).to(device)).loss_sum for each in (tokens, *others)
        )
    differences = [_difference(each, one, seen - 1) for each in changed]
    return max(differences) if all(map(isfinite, differences)) else inf


def _change_in_fp64(replica: Replica, tokens: Tokens, rows: BatchLayout) -> float | None:
    """The same change, computed in fp64 on the host; None if the model cannot be copied or converted."""
    if replica.is_sharded:
        return None
    try:
        model = models.copy_in_fp64(replica.model)
        loss = TokenLoss(model)
        loss.head = loss.head if replica.token_loss.head is not None else None
        return _change_by_later_tokens(loss, tokens, rows, torch.device("cpu"))
    except (RuntimeError, TypeError, MemoryError):
        return None


def _rounding(replica: Replica) -> float:
    """How much rounding may change a loss in the replica's precision. In a mixture of experts, other tokens
    change which of them an expert computes together."""
    if replica.precision == "fp32":
        return 1e-5
    return models.TOLERANCE[replica.precision] if is_mixture_of_experts(replica.model) else 1e-3


_IN_FP64 = 1e-7
"""How much a loss may change in fp64, where models compute parts of it in fp32."""
_CHECKED_TOKENS = 128
"""The check of causality is as good with a short sample as with a long one."""
_LEAST_CHECKED_TOKENS = 4


def check_routing(replica: Replica, loader: Loader, reporter: Reporter) -> None:
    """Leaves the balance loss out if the model does not report the logits of its routers."""
    if replica.balance is None:
        return
    batch = loader.fetch(_typical_samples(loader)[:1])
    with replica.autocast(), models.without_randomness(replica.model):
        if reports_routing(replica.token_loss, batch):
            return
    replica.balance = None
    replica.token_loss.stop_routing()
    loader.form = replace(loader.form, routed=False)
    reporter.event(
        "changed",
        "The model does not report the choices of its routers, so it is trained without their balance loss.",
        "warning",
    )


def reports_routing(loss: TokenLoss, batch: MicroBatch) -> bool:
    """Whether a mixture of experts returns the logits of its routers."""
    try:
        found = loss.router_logits(batch)
    except (AttributeError, TypeError, ValueError, LookupError):
        return False
    return bool(found) and all(isinstance(each, Tensor) for each in found)


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
        batch = loader.fetch(_typical_samples(loader)[:1])
        try:
            error = head_error(replica.token_loss, batch)
        except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as failure:
            if isinstance(failure, RuntimeError) and guards.is_out_of_memory(failure):
                raise
            error = inf  # the part that computes hidden states has another interface
    fallbacks.own_logits = group.from_first(not error <= models.TOLERANCE[replica.precision])
    if fallbacks.own_logits:
        replica.token_loss.head = None
        why = f"the loss differs by {error:.1e}" if isfinite(error) else "it has an interface of its own"
        reporter.event(
            "changed",
            f"The model's logits are not simply those of its output head ({why}), so its own full logits are "
            "used, which needs more memory.",
            "warning",
            loss_error=error if isfinite(error) else None,
        )


def check_packing(
    replica: Replica,
    loader: Loader,
    most_tokens: int,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
) -> None:
    """Falls back to padding if the model does not keep packed samples apart, or fails on long rows.

    A row that mixes samples changes their gradients far more than their loss, of which low precisions hide
    the rest. So the check is made in the weights' own precision and, if there is any doubt, in fp64.

    Args:
        most_tokens: tokens of the largest micro-batch that is planned for any rank.
    """
    packed, padded = loader.form, replace(loader.form, packed=False)
    if fallbacks.padded and packed.packed:
        loader.form = padded
    if not loader.form.packed or fallbacks.padded is False:
        return
    rows = _rows_to_pack(loader)
    found, rounding = _packing_errors(replica, rows, packed, padded)
    if group.from_first(not found.within(_IN_FP64, rounding)):
        exact = _packing_errors_in_fp64(replica, rows, packed, padded)
        fallbacks.padded = group.from_first(exact is None or not exact.within(_IN_FP64, _IN_FP64))
    else:
        fallbacks.padded = False
    if fallbacks.padded:
        loader.form = padded
        error = max(group.from_first(found.mixing), group.from_first(found.difference))
        reporter.event(
            "changed",
            f"The model does not keep packed samples apart (packing changes a sample's loss by {error:.1e}): "
            "they are padded instead.",
            "warning",
        )
    elif group.from_first(_fails_on_long_rows(replica, rows, packed, most_tokens)):
        fallbacks.padded, loader.form = True, padded
        reporter.event(
            "changed",
            "The model fails on packed rows that are longer than its positions: samples are padded instead.",
            "warning",
        )


def _fails_on_long_rows(
    replica: Replica, rows: Sequence[Tokens], packed: BatchLayout, most_tokens: int
) -> bool:
    """Whether the model cannot compute a row that is longer than its positions, although each sample of it is
    shorter. GPT-Neo, for example, cuts its mask out of one that has the size of its positions."""
    positions = _positions_of(replica.model)
    if positions is None or most_tokens <= positions or not rows:
        return False
    row = list(itertools.islice(itertools.cycle(rows), positions // sum(map(len, rows)) * len(rows)))
    row += rows  # the first number of samples that is longer than the positions
    batch = collate([(tokens, np.ones(len(tokens), np.bool_)) for tokens in row], packed)
    try:
        with models.without_randomness(replica.model), torch.no_grad():
            replica.forward(batch.to(replica.device))
    except (RuntimeError, IndexError, ValueError) as error:
        known = isinstance(error, RuntimeError) and guards.is_out_of_memory(error)
        return not known  # the trainer recovers from running out of memory
    return False


def _positions_of(model: Any) -> int | None:
    """The number of positions that the model's configuration names."""
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _packing_errors(
    replica: Replica, rows: Sequence[Tokens], packed: BatchLayout, padded: BatchLayout
) -> tuple["PackingErrors", float]:
    """`packing_errors`, and how much rounding may change a loss. Without autocast, unless the model's kernels
    need it, or ranks exchange parts of the model."""

    def errors() -> PackingErrors:
        return packing_errors(replica.token_loss, rows, packed, padded, replica.device)

    with models.without_randomness(replica.model):
        if not replica.is_sharded:
            try:
                return errors(), _rounding_of_weights(replica)
            except RuntimeError as error:
                if guards.is_out_of_memory(error):
                    raise
        with replica.autocast():
            narrow = replica.precision in models.AUTOCAST
            return errors(), _ROUNDING_IN_16_BITS if narrow else _rounding_of_weights(replica)


def _packing_errors_in_fp64(
    replica: Replica, rows: Sequence[Tokens], packed: BatchLayout, padded: BatchLayout
) -> "PackingErrors | None":
    """`packing_errors` in fp64 on the host; None if the model cannot be copied or converted, or is too
    large."""
    if replica.is_sharded:
        return None
    operations = 2.0 * sum(each.numel() for each in replica.model.parameters()) * sum(map(len, rows))
    if operations > _MOST_OPERATIONS_IN_FP64:
        return None
    try:
        loss = TokenLoss(models.copy_in_fp64(replica.model))
        loss.head = loss.head if replica.token_loss.head is not None else None
        with models.without_randomness(loss.model):
            return packing_errors(loss, rows, packed, padded, torch.device("cpu"))
    except (RuntimeError, TypeError, MemoryError):
        return None


def _rounding_of_weights(replica: Replica) -> float:
    """How much rounding may change a loss if the model computes in the precision of its weights."""
    narrow = any(
        weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
        for weight in replica.model.parameters()
    )
    return _ROUNDING_IN_16_BITS if narrow else 1e-6


_ROUNDING_IN_16_BITS = 1e-3
_MOST_OPERATIONS_IN_FP64 = 5e12
"""Of a forward pass on the host, which takes about a minute."""


def _rows_to_pack(loader: Loader) -> list[Tokens]:
    """The tokens of the two longest samples that may share a micro-batch: some models mix samples only beyond
    a number of tokens. One, if there is no other."""
    lengths = np.minimum(loader.samples.lengths, _PACKED_TOKENS)
    ordered = np.argsort(-lengths, kind="stable")
    if loader.form.apart is not None:
        is_long = lengths[ordered] > loader.form.apart
        ordered = ordered[is_long] if is_long.sum() > 1 else ordered[~is_long]
    return [loader.samples.read(sample)[0][:_PACKED_TOKENS] for sample in ordered[:2].tolist()]


_PACKED_TOKENS = 997
"""The most tokens of a sample with which packing is checked; not a multiple of the blocks that models use."""


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
    return _difference(found, expected, len(batch.targets))


class PackingErrors(NamedTuple):
    """What packing changes, relative to the loss."""

    mixing: float
    """The change of the last sample's loss if the samples before it in the row are replaced. No rounding: a
    row of the same shape is computed in the same order."""
    difference: float
    """The difference between the loss of a packed row, and of the same samples when padded."""

    def within(self, mixing: float, difference: float) -> bool:
        return self.mixing <= mixing and self.difference <= difference


def packing_errors(
    loss: TokenLoss, rows: Sequence[Tokens], packed: BatchLayout, padded: BatchLayout, device: torch.device
) -> PackingErrors:
    """How much the loss of samples depends on their being packed.

    Args:
        rows: each sample's tokens; all of them count.
    """

    def summed(rows: Sequence[Tokens], form: BatchLayout, counted: Sequence[bool]) -> Tensor:
        masks = [np.full(len(tokens), each) for tokens, each in zip(rows, counted, strict=True)]
        found: Tensor = loss(collate(list(zip(rows, masks, strict=True)), form).to(device)).loss_sum
        return found

    every, last = [True] * len(rows), [*(False for _ in rows[1:]), True]
    others = [np.where(tokens == tokens[0], tokens[-1], tokens[0]) for tokens in rows[:-1]]
    with torch.no_grad():
        together, apart = summed(rows, packed, every), summed(rows, padded, every)
        one, other = summed(rows, packed, last), summed([*others, rows[-1]], packed, last)
    found = PackingErrors(
        _difference(other, one, max(1, len(rows[-1]) - 1)),
        _difference(together, apart, max(1, sum(map(len, rows)) - len(rows))),
    )
    return found if all(map(isfinite, found)) else PackingErrors(inf, inf)


@contextlib.contextmanager
def _own_logits(loss: TokenLoss) -> Iterator[None]:
    """Within the block, the loss is computed from the model's own logits."""
    head, loss.head = loss.head, None
    try:
        yield
    finally:
        loss.head = head


def _difference(found: Tensor, expected: Tensor, targets: int) -> float:
    """The difference relative to the loss, or to one nat per token if the loss is smaller, since a loss near
    zero consists only of rounding."""
    least = expected.double().abs().clamp(min=float(targets))
    return float((found.double() - expected.double()).abs() / least)
