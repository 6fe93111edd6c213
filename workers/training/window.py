"""The window: one effective batch being accumulated, exactly and all or nothing.

Use it in any loop of your own: it needs parameters, an optimizer, and for each window the number of
target tokens over all of its micro-batches.

    window = Window(model.parameters(), optimizer, clipping=Clipping(1.0))
    window.open(denominator=target_tokens_of_the_whole_window)
    for micro_batch in micro_batches:
        window.add(loss_sum(model, micro_batch))     # the sum over tokens, not their mean
    result = window.close()
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm


@dataclass(frozen=True)
class Clipping:
    """How gradients are bounded; `limit` null: not at all."""

    limit: float | None
    mode: Literal["after_accumulation", "each_micro_batch", "value"] = "after_accumulation"


@dataclass
class LossScale:
    """fp16's loss scale: halved by an overflow, doubled after many windows without one."""

    value: float
    smallest: float = 1.0
    windows_to_grow: int = 2000
    good_windows: int = 0

    def overflowed(self) -> None:
        self.value = max(self.smallest, self.value / 2)
        self.good_windows = 0

    def held(self) -> None:
        self.good_windows += 1
        if self.good_windows == self.windows_to_grow:
            self.value *= 2
            self.good_windows = 0


@dataclass(frozen=True)
class Closed:
    """What became of a window.

    `loss` is the mean over its target tokens, `grad_norm` the global norm of the whole window's
    gradient before clipping. Where `applied` is false, weights, optimizer and gradients are as they
    were before the window; with `overflow` the same window is to be replayed at the lower loss scale.
    `optimizer_seconds` is the host's time in the optimizer; on a GPU that only starts its kernels.
    """

    loss: float
    grad_norm: float
    applied: bool
    overflow: bool = False
    optimizer_seconds: float = 0.0


class Window:
    """Accumulates micro-batches and makes one optimizer step of them.

    Args:
        parameters: those that the optimizer trains.
        optimizer: stepped once per window that is finite; its gradients are set to None after every window.
        loss_scale: for fp16 autocast; null for every other precision.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        clipping: Clipping,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = loss_scale
        self._denominator = 1.0
        self._loss: Tensor | None = None

    def open(self, denominator: int) -> None:
        """Starts a window whose losses are to be divided by `denominator`, once, as a whole.

        Raises:
            ValueError: there is nothing to divide by.
        """
        if denominator < 1:
            raise ValueError(f"a window needs at least one target token, not {denominator}")
        self.abandon()
        self._denominator = float(denominator)

    def add(self, loss_sum: Tensor) -> None:
        """Backward of one micro-batch: the sum of its token losses, a scalar. Reads nothing back."""
        share = loss_sum / self._denominator
        (share * self._scale.value if self._scale else share).backward()
        share = share.detach()
        self._loss = share if self._loss is None else self._loss + share
        if self._clipping.mode == "each_micro_batch" and self._clipping.limit is not None:
            self._clip(self._norm(), self._clipping.limit * (self._scale.value if self._scale else 1.0))

    def close(self) -> Closed:
        """Decides with one read from the device whether the window is applied, and applies it."""
        assert self._loss is not None, "close() before the first add()"
        if self._scale:
            torch._foreach_mul_(self._gradients(), 1.0 / self._scale.value)
        norm_on_device = self._norm()
        loss, norm = torch.stack([self._loss.to(norm_on_device.dtype), norm_on_device]).tolist()
        if not (isfinite(loss) and isfinite(norm)):
            overflow = self._scale is not None and isfinite(loss) and self._scale.value > self._scale.smallest
            if overflow and self._scale:
                self._scale.overflowed()
            self.abandon()
            return Closed(loss, norm, applied=False, overflow=overflow)
        if self._clipping.limit is not None:
            if self._clipping.mode == "value":
                clip_grad_value_(self._parameters, self._clipping.limit)
            else:
                self._clip(norm_on_device, self._clipping.limit)
        began = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - began
        if self._scale:
            self._scale.held()
        self.abandon()
        return Closed(loss, norm, applied=True, optimizer_seconds=seconds)

    def finite(self) -> bool:
        """Whether loss and gradient so far are finite; the window is abandoned."""
        assert self._loss is not None, "finite() before the first add()"
        finite = bool((self._loss.isfinite() & self._norm().isfinite()).item())
        self.abandon()
        return finite

    def abandon(self) -> None:
        """Forgets what was accumulated; weights and optimizer are untouched."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss = None

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _norm(self) -> Tensor:
        return get_total_norm(self._gradients())

    def _clip(self, norm: Tensor, limit: float) -> None:
        clip_grads_with_norm_(self._parameters, limit, norm)
