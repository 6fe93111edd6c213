"""The loss of a model whose logits are those of its head, perhaps scaled or soft-capped, chunk by chunk: the
full matrix of logits (tokens × vocabulary) never exists."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workers.training.gradients.direct_sums import Products, sum_of
from workers.training.models.head import Head

_FP16_GRADIENT_SCALE = 256.0
"""Keeps small probabilities above fp16's smallest numbers in the products of a chunk."""


class ChunkedLoss(torch.autograd.Function):
    """Output head and cross-entropy in one; gradients are computed in the forward pass, chunk by chunk.

    With p = softmax(z) and the smoothed target q, dL/dz = weight × (p - q); the products with the head's
    weight and the hidden states follow at once, so that a chunk's logits are freed before the next chunk's
    are computed (the idea of Hsu et al. 2024, Liger Kernel, section 3.2). With a factor, by which the loss
    will be multiplied, the weight's gradient is added to its sum at once (`DirectSums`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        smoothing: float,
        head: Head,
        dtype: torch.dtype,
        factor: float | None,
        fused: Callable[..., Tensor] | None,
        products: Products,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        heaviest = None
        if token_weights is not None and dtype == torch.float16:
            heaviest = token_weights.abs().amax() if len(token_weights) else token_weights.new_ones(())
            heaviest = torch.where(heaviest > 0, heaviest, torch.ones_like(heaviest))
            token_weights = token_weights / heaviest  # so that none leaves fp16's range
        gradients = _HeadGradients(hidden, weight, bias, wanted, head, dtype, factor)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        rows = head.rows if fused is None else 2 * head.rows  # with logits in half the bytes
        for start in head.starts(len(hidden)) if fused is None else range(0, len(hidden), rows):
            part = slice(start, start + rows)
            states = hidden[part].to(dtype)
            own = None if token_weights is None else token_weights[part]
            logits = products.forward(states, gradients.matrix, None if bias is None else bias.to(dtype))
            if fused is not None:  # it leaves the errors in place of the logits
                total += fused(
                    logits, targets[part], own,
                    scale=head.scale, smoothing=smoothing, with_gradient=any(wanted),
                ).sum()  # fmt: skip
                gradients.add_rounded(part, logits, states)
                del logits
                continue
            logits = logits.to(wide)
            loss, error = _loss_and_error(logits, targets[part], own, head, smoothing, any(wanted))
            total += loss
            if error is not None:
                gradients.add(part, error, states)
            del logits, error  # else they would still be there beside the next chunk's logits
        if heaviest is not None:
            total = total * heaviest
            gradients.multiply(heaviest)
        ctx.gradients = (gradients.to_hidden, gradients.to_weight, gradients.to_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the chunked loss computes its gradients once, so it supports only one backward"
            )
        found = [
            None if gradient is None else gradient.mul_(outer[0]).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return *found, None, None, None, None, None, None, None, None, None


def _loss_and_error(
    logits: Tensor, targets: Tensor, weights: Tensor | None, head: Head, smoothing: float, with_error: bool
) -> tuple[Tensor, Tensor | None]:
    """A chunk's summed loss and, if `with_error`, the loss's gradient with respect to the head's products
    (its error).

    Args:
        logits: these products, of shape (rows, vocabulary) and at least fp32; overwritten.
        targets: of shape (rows,).
        weights: of shape (rows,); None: 1 for each.
    """
    own, slope = targets.unsqueeze(1), None
    if head.scale != 1.0:
        logits *= head.scale
    if head.cap is not None:
        logits.div_(head.cap).tanh_()
        slope = (1.0 - logits * logits) * head.scale
        logits *= head.cap
    target = (1.0 - smoothing) * logits.gather(1, own)
    if smoothing:
        target = target + smoothing * logits.mean(-1, keepdim=True)
    largest = logits.amax(-1, keepdim=True)
    error = logits.sub_(largest).exp_()  # in place, as all that follows: one buffer for a chunk
    total_of_row = error.sum(-1, keepdim=True)
    losses = largest + total_of_row.log() - target
    if weights is not None:
        losses = losses * weights.unsqueeze(1)
    loss = losses.sum()
    if not with_error:
        return loss, None
    error /= total_of_row
    if smoothing:
        error -= smoothing / error.shape[1]
    error.scatter_add_(1, own, torch.full_like(own, -(1.0 - smoothing), dtype=error.dtype))
    if weights is not None:
        error *= weights.unsqueeze(1)
    if slope is not None or head.scale != 1.0:
        error *= head.scale if slope is None else slope
    return loss, error


class _HeadGradients:
    """The gradients of hidden states, the head's weight and its bias, summed over chunks.

    Args:
        wanted: which of the three are wanted.
        dtype: the precision of products.
        factor: see `ChunkedLoss`; None: the weight's gradient is a tensor of its own.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, bool, bool],
        head: Head,
        dtype: torch.dtype,
        factor: float | None,
    ) -> None:
        self._wide = torch.promote_types(dtype, torch.float32)
        self._dtype, self._head, self._factor = dtype, head, factor
        wants_hidden, wants_weight, wants_bias = wanted
        self.to_hidden = torch.empty_like(hidden) if wants_hidden else None
        is_own = wants_weight and factor is None
        self.to_weight = torch.zeros_like(weight, dtype=self._wide) if is_own else None
        self._sums = sum_of(weight) if wants_weight and factor is not None else None
        self.to_bias = torch.zeros_like(bias, dtype=self._wide) if wants_bias and bias is not None else None
        # the last, since it is freed first: a GPU's allocator then has no gap where it was
        self.matrix = weight.to(dtype)

    def add(self, part: slice, error: Tensor, states: Tensor) -> None:
        """Adds a chunk.

        Args:
            error: the loss's gradient with respect to the logits, of shape (rows, vocabulary), at
                least fp32.
            states: of shape (rows, width), in the precision of products.
        """
        if self._dtype == torch.float16:
            self._add_in_fp16(part, error, states)
        else:
            self.add_rounded(part, error.to(self._dtype), states, error)

    def add_rounded(self, part: slice, narrow: Tensor, states: Tensor, error: Tensor | None = None) -> None:
        """Adds a chunk. `narrow` is its error in the precision of products; `error` is the same before it was
        rounded, from which the bias's gradient is summed (None: it was not rounded)."""
        if self.to_hidden is not None:
            self.to_hidden[part] = narrow @ self.matrix
        if self._sums is not None:
            assert self._factor is not None
            if narrow.dtype == self._wide:
                self._sums.addmm_(narrow.t(), states, alpha=self._factor)
            else:
                self._sums.add_(narrow.t() @ states, alpha=self._factor)
        if self.to_weight is not None:
            _add_product(self.to_weight, narrow, states, self._head)
        if self.to_bias is not None:
            self.to_bias += narrow.sum(0, dtype=self._wide) if error is None else error.sum(0)

    def _add_in_fp16(self, part: slice, error: Tensor, states: Tensor) -> None:
        """Adds a chunk whose products must stay within fp16's range."""
        if self.to_hidden is not None:
            narrow = (error * _FP16_GRADIENT_SCALE).to(self._dtype)
            self.to_hidden[part] = (narrow @ self.matrix).to(self._wide) / _FP16_GRADIENT_SCALE
        if self.to_weight is not None:  # a sum over the chunk's positions, which fp16 must hold too
            share = _FP16_GRADIENT_SCALE / len(states)
            self.to_weight += ((error * share).to(self._dtype).t() @ states).to(self._wide) / share
        if self.to_bias is not None:
            self.to_bias += error.sum(0)

    def multiply(self, by: Tensor) -> None:
        """Multiplies all gradients; there must be no factor."""
        for gradient in (self.to_hidden, self.to_weight, self.to_bias):
            if gradient is not None:
                gradient.mul_(by)


def can_fuse(head: Head) -> bool:
    """Whether the kernel of fused_cross_entropy.py can compute the loss from a head's logits."""
    return head.cap is None and head.scale > 0.0


def _add_product(to: Tensor, errors: Tensor, states: Tensor, head: Head) -> None:
    """Adds errorsᵀ · states to a sum, in place.

    Args:
        to: at least fp32, of shape (vocabulary, width).
        errors: of shape (rows, vocabulary).
        states: of shape (rows, width), as precise as the errors.
    """
    if errors.dtype == to.dtype:
        to.addmm_(errors.t(), states)
    elif to.is_cuda and _adds_in_fp32(to.device):  # the product needs no tensor of its own
        torch.ops.aten.addmm.dtype_out(to, errors.t(), states, to.dtype, out=to)
    elif head.device == "cuda" and not to.is_cuda:  # in the simulation of a GPU, only sizes count
        to.add_(0.0)
    else:
        to += errors.t() @ states


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether this GPU's library adds products of bf16 to a matrix in fp32."""
    try:
        sums, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device).bfloat16()
        torch.ops.aten.addmm.dtype_out(sums, factor, factor, torch.float32, out=sums)
    except (RuntimeError, AttributeError):
        return False
    return True
