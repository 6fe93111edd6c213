"""The cross-entropy of a chunk of logits and its gradient in one kernel, for bf16 on a GPU.

PyTorch's operators read and write a chunk's logits a dozen times, in fp32. This kernel reads them twice, as
bf16, and replaces them by the gradient: once for the largest logit and the sum of exponentials, which are
updated block by block (Milakov and Gimelshein 2018, arXiv:1805.02867), and once for the gradient. All
arithmetic is in fp32, as without it.

It is written in Triton, which comes with PyTorch's CUDA builds for Linux; `selection.py` imports this module
where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, targets, weights, losses, row_stride, scale, smoothing,
    columns: tl.constexpr, is_weighted: tl.constexpr, with_gradient: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * row_stride
    target = tl.load(targets + row)
    weight = tl.load(weights + row) if is_weighted else 1.0
    largest, total, plain_sum = float("-inf"), 0.0, 0.0
    for start in range(0, columns, block_size):
        column = start + tl.arange(0, block_size)
        there = column < columns
        block = tl.load(own + column, mask=there, other=float("-inf")).to(tl.float32) * scale
        larger = tl.maximum(largest, tl.max(block))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(block - larger))
        largest = larger
        plain_sum += tl.sum(tl.where(there, block, 0.0))
    log_total = largest + tl.log(total)
    of_target = tl.load(own + target).to(tl.float32) * scale
    loss = log_total - (1.0 - smoothing) * of_target - smoothing * plain_sum / columns
    tl.store(losses + row, loss * weight)
    if with_gradient:
        tl.debug_barrier()  # every thread has read the target's logit
        for start in range(0, columns, block_size):
            column = start + tl.arange(0, block_size)
            there = column < columns
            block = tl.load(own + column, mask=there, other=float("-inf")).to(tl.float32) * scale
            error = tl.exp(block - log_total) - smoothing / columns
            error = tl.where(column == target, error - (1.0 - smoothing), error)
            tl.store(own + column, (error * weight * scale).to(tl.bfloat16), mask=there)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    *,
    scale: float,
    smoothing: float,
    with_gradient: bool,
) -> Tensor:
    """The weighted cross-entropy of each row, in nats: fp32 of shape (rows,).

    Args:
        logits: bf16 of shape (rows, vocabulary), before they are multiplied by `scale`. With a gradient, they
            are replaced by the gradient of the losses' sum.
        targets: int64 of shape (rows,).
        weights: fp32 of shape (rows,); None if all are 1.
        scale: positive.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _cross_entropy[(len(logits),)](
            logits, targets, losses if weights is None else weights, losses, logits.stride(0), scale,
            smoothing, columns=logits.shape[1], is_weighted=weights is not None, with_gradient=with_gradient,
            block_size=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return losses
