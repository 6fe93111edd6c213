"""Gradients in a few large buffers, each summed over all ranks at once, while the last backward still runs.

As in PyTorch DDP (Li et al. 2020, section 3.2): a parameter's gradient is a view of its bucket, and a bucket
is exchanged as soon as the last backward pass of the window has completed all of its gradients. In contrast
to DDP, the sum is not averaged, a rank may have no micro-batch at all, and a rank that fails still takes
part, so that no other rank waits for it in vain.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.training.distributed.compression import Exchange
from workers.training.distributed.group import Pending

BUCKET_BYTES = 25 * 2**20
"""The size of a bucket. Smaller ones begin earlier; larger ones use the link better. DDP's default, too."""


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are exchanged together."""

    parameters: list[Tensor]
    sums: Tensor
    """All of their gradients, one after the other; of shape (elements,)."""
    views: list[Tensor]
    """Each parameter's part of it, in the parameter's shape."""
    missing: set[Tensor] = field(default_factory=set)
    """Parameters whose gradient the last backward pass has not completed yet."""
    pending: Pending | None = None
    began: bool = False


class Buckets:
    """Sums gradients in place, in each parameter's own precision, over micro-batches and over ranks.

    The buffers are kept between windows.
    """

    is_sharded = False

    def __init__(
        self, parameters: Iterable[Tensor], exchange: Exchange, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._exchange = exchange
        # Backward passes complete the last layers first.
        self._buckets = [_bucket(part) for part in in_parts(self._parameters[::-1], bucket_bytes)]
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._present: set[Tensor] = set()
        self._is_last = False
        self._next = 0
        """The bucket whose exchange begins next: all ranks begin them in the same order."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._completed) for p in self._parameters]

    def open(self, loss_factor: float) -> None:
        self._present.clear()
        self._is_last, self._next = False, 0
        for bucket in self._buckets:
            bucket.sums.zero_()
            bucket.missing = set(bucket.parameters)
            bucket.pending, bucket.began = None, False
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def begin_last(self) -> None:
        self._is_last = True

    def wait_until_added(self) -> None:
        """Every gradient is added during its backward pass."""

    def sums(self) -> dict[Tensor, Tensor]:
        return {p: p.grad for p in self._parameters if p in self._present and p.grad is not None}

    def present(self) -> list[bool]:
        return [parameter in self._present for parameter in self._parameters]

    def exchange(self, present: Sequence[bool], *, discard: bool) -> None:
        while self._next < len(self._buckets):
            self._begin_next()
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
        self._present = {p for p, somewhere in zip(self._parameters, present, strict=True) if somewhere}
        for parameter in self._parameters:
            if parameter not in self._present:
                parameter.grad = None  # as on one device: the optimizer leaves it as it is

    def assign_to_parameters(self) -> None:
        """The gradients are where an optimizer looks for them."""

    def clear(self) -> None:
        self._present.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def _completed(self, parameter: Tensor) -> None:
        """Called by autograd after each backward pass that reaches a parameter."""
        self._present.add(parameter)
        bucket = self._of[parameter]
        if bucket.began:
            raise RuntimeError("a gradient was added to after its exchange had begun")
        if not self._is_last:
            return
        bucket.missing.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[self._next]
        bucket.pending = self._exchange.begin(bucket.sums)
        bucket.began = True
        self._next += 1


def in_parts(parameters: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Successive parameters of one precision and device, up to a number of bytes or at least one."""
    part: list[Tensor] = []
    size = 0
    for parameter in parameters:
        alike = not part or (part[0].dtype, part[0].device) == (parameter.dtype, parameter.device)
        if part and (not alike or size + parameter.nbytes > most_bytes):
            yield part
            part, size = [], 0
        part.append(parameter)
        size += parameter.nbytes
    if part:
        yield part


def _bucket(parameters: list[Tensor]) -> _Bucket:
    sums = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    views = [
        part.view(p.shape)
        for p, part in zip(parameters, sums.split([p.numel() for p in parameters]), strict=True)
    ]
    return _Bucket(parameters, sums, views)
