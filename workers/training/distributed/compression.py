"""Gradients that are sent in 16 bits: half the traffic of fp32, and a rounding error that is stated.

A sum over ranks in 16 bits would round after each addition. Here each rank's sum is rounded once, the parts
are added in fp32 (or higher), and the total is rounded once more, however many ranks there are. Each rank
adds up one part of the total (reduce-scatter) and sends it to all others (all-gather), which is the traffic
of a ring all-reduce. All ranks end with the same bits.

The error per element is at most u (|g_1| + … + |g_n| + |total|), with u = 2^-8 for bf16 and 2^-11 for fp16.
fp16 has a small range, so each rank scales what it sends by a power of two; elements that are less than about
2^-38 of the largest one become 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.contract.spec import GradientCompression
from workers.training.distributed.group import Group, Pending

_LARGEST_EXPONENT = 14
"""fp16 values are scaled so that the largest is below 2^15; fp16 ends below 2^16."""


class Exchange(Protocol):
    """Adds up gradients over all ranks."""

    def begin(self, sums: Tensor) -> Pending | None:
        """Starts to replace a tensor of shape (elements,) by its sum over all ranks.

        Returns:
            What to wait for before the tensor is used; None if it is the sum already. All ranks wait for
            their exchanges in the order in which they began them.
        """


@dataclass(frozen=True)
class Exact:
    """Adds up gradients in their own precision."""

    group: Group

    def begin(self, sums: Tensor) -> Pending | None:
        return self.group.begin_all_reduce(sums)


class In16Bits:
    """Adds up gradients that are sent in 16 bits."""

    def __init__(self, group: Group, compression: GradientCompression) -> None:
        self._group, self._exact = group, Exact(group)
        self.dtype = torch.bfloat16 if compression == "bf16" else torch.float16
        self._is_off = False

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within the block, gradients are sent in their own precision."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def begin(self, sums: Tensor) -> Pending | None:
        if self._is_off or sums.element_size() <= 2:
            return self._exact.begin(sums)
        return _InProgress(sums, self._group, self.dtype)


class _InProgress:
    """The exchange of one tensor: `wait()` does its second half."""

    def __init__(self, sums: Tensor, group: Group, dtype: torch.dtype) -> None:
        self._sums, self._group = sums, group
        rows, length = group.size, -(-sums.numel() // group.size)
        # All memory is taken before anything is sent, so that a rank without memory sends nothing.
        self._sent = torch.zeros((rows, length), dtype=dtype, device=sums.device)
        self._received = torch.empty_like(self._sent)
        wider = torch.promote_types(sums.dtype, torch.float32)
        self._own_part, self._row = (torch.zeros(length, dtype=wider, device=sums.device) for _ in range(2))
        self._total = torch.empty_like(self._sent[0])
        self._scales = torch.empty((rows, 1), dtype=torch.float32, device=sums.device)
        scale = _scale(sums, dtype)
        self._sent.view(-1)[: sums.numel()].copy_(sums.mul_(scale))
        self._pending = [
            group.begin_all_gather(scale, self._scales),
            group.begin_all_to_all(_bytes(self._sent), _bytes(self._received)),
        ]

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        for row, scale in zip(self._received, self._scales, strict=True):
            self._own_part += self._row.copy_(row).div_(scale)
        scale = _scale(self._own_part, self._sent.dtype)
        self._total.copy_(self._own_part.mul_(scale))
        for pending in (
            self._group.begin_all_gather(scale, self._scales),
            self._group.begin_all_gather(_bytes(self._total), _bytes(self._received)),
        ):
            pending.wait()
        length = self._received.shape[1]
        for row, scale, part in zip(self._received, self._scales, self._sums.split(length), strict=False):
            part.copy_(row[: len(part)]).div_(scale)


def _scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two, of shape (1,), that `values` are multiplied by before they are rounded to `dtype`."""
    one = torch.ones(1, dtype=torch.float32, device=values.device)
    if dtype != torch.float16 or not values.numel():
        return one
    largest = torch.linalg.vector_norm(values, float("inf")).to(torch.float32)
    exponent = (_LARGEST_EXPONENT - torch.log2(largest).floor()).clamp(-120, 120)
    return torch.where(largest > 0, torch.exp2(exponent), one)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend can send."""
    return tensor.view(torch.uint8)
