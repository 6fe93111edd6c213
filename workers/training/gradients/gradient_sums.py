"""Where a window's gradients are summed: in place, or held in fp32, or on the host.

With several ranks, each sums its own micro-batches; `exchange()` then adds up the sums of all ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.training.distributed.buckets import BUCKET_BYTES, Buckets, in_parts
from workers.training.distributed.compression import Exchange
from workers.training.gradients.direct_sums import DirectSums
from workers.training.gradients.host_sums import HostSums


class Gradients(Protocol):
    """The gradients of the parameters that require one, summed over a window's micro-batches."""

    is_sharded: bool
    """Whether each rank holds only a part of each sum."""

    def open(self, loss_factor: float) -> None:
        """Prepares for a window.

        Args:
            loss_factor: what each micro-batch's summed loss is multiplied by before its backward pass.
        """

    def begin_last(self) -> None:
        """Announces the last backward pass of this rank: each sum may be exchanged as soon as that pass has
        completed it."""

    def wait_until_added(self) -> None:
        """Waits for gradients that are still being added after the last backward pass.

        Raises:
            RuntimeError: the device or the host failed meanwhile, for example for lack of memory.
        """

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far of each parameter that has one."""

    def present(self) -> list[bool]:
        """Whether this rank has a sum of each parameter, in their order."""

    def exchange(self, present: Sequence[bool], *, discard: bool) -> None:
        """Replaces each sum by that over all ranks. Every rank calls it once per window.

        Args:
            present: for each parameter, whether any rank has a sum of it; the others stay without.
            discard: whether the window will not be used.
        """

    def assign_to_parameters(self) -> None:
        """Puts the sums where an optimizer looks for them."""

    def clear(self) -> None:
        """Discards the sums."""

    def release(self) -> None:
        """Releases the parameters."""


class InPlace:
    """Lets autograd sum gradients in each parameter's `grad`, in the parameter's own precision.

    Args:
        direct: adds the gradients of large weights while a window is open; None leaves all to autograd.
    """

    is_sharded = False

    def __init__(self, parameters: Iterable[Tensor], direct: DirectSums | None = None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._direct = direct

    def open(self, loss_factor: float) -> None:
        if self._direct is not None:
            self._direct.begin(loss_factor)

    def begin_last(self) -> None:
        """There is no other rank."""

    def wait_until_added(self) -> None:
        """Every gradient is added during its backward pass."""

    def present(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._parameters]

    def exchange(self, present: Sequence[bool], *, discard: bool) -> None:
        """There is no other rank: several ranks sum in `Buckets`."""

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far of each parameter that has one."""
        return {p: p.grad for p in self._parameters if p.grad is not None}

    def assign_to_parameters(self) -> None:
        """Puts the sums where an optimizer looks for them."""

    def clear(self) -> None:
        if self._direct is not None:
            self._direct.end()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Releases the parameters."""
        self.clear()


class SeparateAccumulator:
    """Sums gradients outside of `grad`, which is emptied as soon as a parameter's gradient is known.

    The sums are in fp32, or in the parameters' precision if that is higher. If the host holds them, they
    take no device memory between micro-batches. The optimizer gets each sum rounded once to its parameter's
    precision.

    Args:
        host: the device that holds the sums until the optimizer's step; None keeps them with their
        parameters.
        exchange: sums them over all ranks after the last micro-batch; None if there is only one.
        background: sums them on the host while the backward pass goes on; None: the pass waits.
    """

    is_sharded = False

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        host: torch.device | None = None,
        exchange: Exchange | None = None,
        background: HostSums | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._host = host
        self._exchange = exchange
        self._background = background
        self._own_sums: dict[Tensor, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self._parameters]

    def open(self, loss_factor: float) -> None:
        """There is nothing to prepare."""

    def begin_last(self) -> None:
        """The sums are exchanged after it."""

    def wait_until_added(self) -> None:
        if self._background is not None:
            self._background.sums()

    def present(self) -> list[bool]:
        sums = self.sums()
        return [parameter in sums for parameter in self._parameters]

    def exchange(self, present: Sequence[bool], *, discard: bool) -> None:
        if discard or self._exchange is None:
            return
        sums = self.sums()
        exchanged = [p for p, somewhere in zip(self._parameters, present, strict=True) if somewhere]
        for parameter in exchanged:
            if parameter not in sums:
                wider = torch.promote_types(parameter.dtype, torch.float32)
                device = self._host or parameter.device
                sums[parameter] = torch.zeros_like(parameter, dtype=wider, device=device)
        for part in in_parts([sums[parameter] for parameter in exchanged], BUCKET_BYTES):
            together = torch.cat([own.flatten() for own in part])
            pending = self._exchange.begin(together)
            if pending is not None:
                pending.wait()
            for own, summed in zip(part, together.split([own.numel() for own in part]), strict=True):
                own.copy_(summed.view(own.shape))

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far of each parameter that has one."""
        return self._own_sums if self._background is None else self._background.sums()

    def assign_to_parameters(self) -> None:
        """Puts the sums where an optimizer looks for them."""
        sums = self.sums()
        for parameter in list(sums):
            parameter.grad = sums.pop(parameter).to(parameter.device, parameter.dtype)

    def clear(self) -> None:
        self._own_sums.clear()
        if self._background is not None:
            self._background.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Releases the parameters: autograd keeps their gradients in `grad` again."""
        self.clear()
        if self._background is not None:
            self._background.close()
        for hook in self._hooks:
            hook.remove()

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        if self._background is not None:
            self._background.add(parameter, gradient)
            return
        device = self._host or gradient.device
        held = self._own_sums.get(parameter)
        if held is None:
            wider = torch.promote_types(gradient.dtype, torch.float32)
            self._own_sums[parameter] = gradient.to(device, wider)
        else:
            held.add_(gradient.to(device))


def gradients_for(
    parameters: Sequence[Tensor],
    *,
    in_fp32: bool,
    host: torch.device | None,
    exchange: Exchange | None = None,
    direct: DirectSums | None = None,
) -> Gradients:
    """Where gradients are summed: in host memory if requested, or in fp32 for lower precisions.

    Args:
        exchange: sums them over all ranks; None if there is only one.
        direct: adds the gradients of large weights, if they are summed in place.
    """
    low = any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
    if host or (low and in_fp32):
        on_gpu = next((p.device for p in parameters if p.requires_grad and p.is_cuda), None)
        background = HostSums(on_gpu) if host and on_gpu is not None else None
        return SeparateAccumulator(parameters, host=host, exchange=exchange, background=background)
    return InPlace(parameters, direct) if exchange is None else Buckets(parameters, exchange)
