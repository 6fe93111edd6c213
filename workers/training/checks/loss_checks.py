"""Checks with one or two samples before training.

The model must run, must not see the tokens that it predicts, and should report its routers' choices if it is
a mixture of experts.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from app.contract.spec import AuxScope
from workers.reporter import Reporter
from workers.training.data.batch_loader import Loader
from workers.training.data.preparation import Tokens
from workers.training.devices import device_errors
from workers.training.distributed.group import Group
from workers.training.exceptions import CannotTrain
from workers.training.losses.load_balancing_loss import has_unsupported_loss
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, MicroBatch, collate
from workers.training.models.dropout import without_randomness
from workers.training.models.model_parts import is_mixture_of_experts
from workers.training.models.precision import AUTOCAST, TOLERANCE, copy_in_fp64
from workers.training.replica import Replica


@contextlib.contextmanager
def final_failures(group: Group) -> Iterator[None]:
    """Turns errors of the model's own code into a final failure: it would fail in the same way in each
    attempt. Errors of memory, of the device or of other ranks are passed on unchanged.

    Raises:
        CannotTrain: the model fails; the message says how.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _fails(error) from error
    except RuntimeError as error:
        if group.size > 1 or device_errors.is_transient(error):
            raise
        raise _fails(error) from error


def _fails(error: Exception) -> CannotTrain:
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return CannotTrain(
        "model_fails",
        f"the model fails in the checks before the first step ({type(error).__name__}: {first}): check its "
        "config.json, and that max_length is not more than it can take",
    )


def check_that_it_runs(replica: Replica, loader: Loader) -> None:
    """Runs the model on the longest sample, in training mode: a model whose configuration is impossible fails
    here."""
    samples = loader.samples
    longest = samples.read(int(np.argmax(samples.lengths)))
    rows = BatchLayout(loader.layout.pad_id, routed=loader.layout.routed)
    batch = collate([longest], rows).to(replica.device)
    try:
        with torch.no_grad(), replica.autocast():
            replica.token_loss(batch)
    except RuntimeError as error:
        if device_errors.is_out_of_memory(error):
            return  # training knows what to do then
        if replica.precision not in AUTOCAST or device_errors.is_transient(error):
            raise
        with torch.no_grad():
            replica.token_loss(batch)  # its own error is a clearer one
        raise CannotTrain(
            "model_fails",
            f"the model's code does not run in mixed precision ({str(error).strip().splitlines()[0][:200]}): "
            'set mixed_precision to "no" or "pure_bf16"',
        ) from error


def check_causality(replica: Replica, loader: Loader, group: Group) -> None:
    """Checks that no token's prediction depends on the tokens after it: a model that sees them would learn to
    copy, and padding on the right would change its loss.

    Where a token's experts are computed together with those of other tokens, rounding changes the loss too,
    and in low precisions by more than is tolerated for later tokens. So if there is any change, the check is
    repeated in fp64, with a copy of the model on the host.

    Raises:
        CannotTrain: a prediction depends on later tokens.
    """
    longest = int(np.argmax(loader.samples.lengths))
    tokens = loader.samples.read(longest)[0][:_CHECKED_TOKENS]
    if len(tokens) < _LEAST_CHECKED_TOKENS:
        return
    rows = BatchLayout(loader.layout.pad_id, routed=loader.layout.routed)
    with replica.autocast():
        error = _change_by_later_tokens(replica.token_loss, tokens, rows, replica.device)
    tolerance = ROUNDING_IN_FP64
    if group.broadcast(error > tolerance):
        exact = _change_in_fp64(replica, tokens, rows)
        error, tolerance = (error, _rounding(replica)) if exact is None else (exact, ROUNDING_IN_FP64)
    error = group.broadcast(error)
    if not isfinite(error):
        overflows = replica.precision == "fp16"
        raise CannotTrain(
            "not_finite",
            "the model's loss on a sample is not finite: "
            + ('its values may be too large for fp16: set mixed_precision to "no". Otherwise, ' * overflows)
            + "check its config.json and its weights",
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
    with torch.no_grad(), without_randomness(loss.model):
        one, *changed = (
            loss(collate([(each, counts)], rows).to(device)).loss_sum for each in (tokens, *others)
        )
    differences = [relative_difference(each, one, seen - 1) for each in changed]
    return max(differences) if all(map(isfinite, differences)) else inf


def _change_in_fp64(replica: Replica, tokens: Tokens, rows: BatchLayout) -> float | None:
    """The same change, computed in fp64 on the host; None if the model cannot be copied or converted."""
    if replica.is_sharded:
        return None
    try:
        model = copy_in_fp64(replica.model)
        loss = TokenLoss(model)
        loss.head = loss.head if replica.token_loss.head is not None else None
        return _change_by_later_tokens(loss, tokens, rows, torch.device("cpu"))
    except (RuntimeError, TypeError, MemoryError):
        return None


def _rounding(replica: Replica) -> float:
    """How much rounding may change a loss in the replica's precision. In a mixture of experts,
    replacing tokens changes which tokens an expert computes together."""
    if replica.precision == "fp32":
        return 1e-5
    return TOLERANCE[replica.precision] if is_mixture_of_experts(replica.model) else 1e-3


ROUNDING_IN_FP64 = 1e-7
"""How much a loss may change in fp64, where models compute parts of it in fp32."""
_CHECKED_TOKENS = 128
"""The check of causality is as good with a short sample as with a long one."""
_LEAST_CHECKED_TOKENS = 4


def check_routing(replica: Replica, loader: Loader, reporter: Reporter, scope: AuxScope) -> None:
    """Leaves the load-balancing loss out if the model does not report the logits of its routers.

    Args:
        scope: the scope of the loss that was requested.
    """
    if replica.balance is None:
        if scope != "none" and has_unsupported_loss(replica.model):
            message = "The model's load-balancing loss is not supported, so it is trained without it."
            reporter.event("changed", message, "warning")
        return
    batch = loader.fetch(typical_samples(loader)[:1])
    with replica.autocast(), without_randomness(replica.model):
        if reports_routing(replica.token_loss, batch):
            return
    replica.balance = None
    replica.token_loss.stop_routing()
    loader.layout = replace(loader.layout, routed=False)
    reporter.event(
        "changed",
        "The model does not report the choices of its routers, so it is trained without their "
        "load-balancing loss.",
        "warning",
    )


def reports_routing(loss: TokenLoss, batch: MicroBatch) -> bool:
    """Whether a mixture of experts returns the logits of its routers."""
    try:
        found = loss.router_logits(batch)
    except (AttributeError, TypeError, ValueError, LookupError):
        return False
    return bool(found) and all(isinstance(each, Tensor) for each in found)


def typical_samples(loader: Loader) -> list[int]:
    """Two samples of about median length that have targets; one, if there is no other."""
    counted = np.flatnonzero(loader.samples.targets)
    ordered = counted[np.argsort(loader.samples.lengths[counted], kind="stable")]
    middle: list[int] = ordered[max(0, (len(ordered) - 1) // 2) :][:2].tolist()
    return middle


def relative_difference(found: Tensor, expected: Tensor, targets: int) -> float:
    """The difference relative to the loss, or to one nat per token if the loss is smaller, since a loss near
    zero consists only of rounding."""
    least = expected.double().abs().clamp(min=float(targets))
    return float((found.double() - expected.double()).abs() / least)
