"""Where a window's gradients are summed: in place, or held in fp32, or on the host."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class InPlace:
    """Lets autograd sum gradients in each parameter's `grad`, in the parameter's own precision."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far of each parameter that has one."""
        return {p: p.grad for p in self._parameters if p.grad is not None}

    def deliver(self) -> None:
        """Puts the sums where an optimizer looks for them."""

    def clear(self) -> None:
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
    """

    def __init__(self, parameters: Iterable[Tensor], *, host: torch.device | None = None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._host = host
        self._sums: dict[Tensor, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in self._parameters]

    def sums(self) -> dict[Tensor, Tensor]:
        """The sum so far of each parameter that has one."""
        return self._sums

    def deliver(self) -> None:
        """Puts the sums where an optimizer looks for them."""
        for parameter in list(self._sums):
            parameter.grad = self._sums.pop(parameter).to(parameter.device, parameter.dtype)

    def clear(self) -> None:
        self._sums.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Releases the parameters: autograd keeps their gradients in `grad` again."""
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        device = self._host or gradient.device
        held = self._sums.get(parameter)
        if held is None:
            wider = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[parameter] = gradient.to(device, wider)
        else:
            held.add_(gradient.to(device))


def gradients_for(
    parameters: Sequence[Tensor], *, in_fp32: bool, host: torch.device | None
) -> InPlace | SeparateAccumulator:
    """Where gradients are summed: in host memory if requested, or in fp32 for lower precisions."""
    low = any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
    return SeparateAccumulator(parameters, host=host) if host or (low and in_fp32) else InPlace(parameters)
