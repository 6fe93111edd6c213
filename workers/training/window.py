"""The window: one effective batch being accumulated, exactly and all or nothing.

Use it in any loop of your own. It needs parameters, an optimizer, and for each window the number of
target tokens (or the weight) over all of its micro-batches:

    window = Window(model.parameters(), optimizer, Clipping(1.0))
    for batch in batches:                                 # each a list of micro-batches
        window.open(denominator=sum(m.targets for m in batch), micro_batches=len(batch))
        for micro_batch in batch:
            window.add(loss_sum(model, micro_batch))      # the sum over tokens, not their mean
        if window.should_update:
            closed = window.close()                       # clipped, checked, stepped
            print(closed.loss, closed.grad_norm, closed.applied)

tests/training/test_own_loop.py is such a loop.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from workers.training import memory
from workers.training.gradients import Held, InPlace


@dataclass(frozen=True)
class Clipping:
    """How gradients are bounded; `limit` null: not at all."""

    limit: float | None = None
    mode: Literal["after_accumulation", "each_micro_batch", "value"] = "after_accumulation"


@dataclass
class LossScale:
    """fp16's loss scale: halved by an overflow, doubled after many windows without one."""

    value: float
    smallest: float = 1.0
    windows_to_grow: int = 2000
    good_windows: int = 0
    _before: float | None = None
    """The scale when the window at hand first overflowed."""

    def overflowed(self) -> None:
        self._before = self._before or self.value
        self.value = max(self.smallest, self.value / 2)
        self.good_windows = 0

    def not_at_fault(self) -> None:
        """No scale helps this window: the one before it is taken back."""
        self.value, self._before = self._before or self.value, None

    def held(self) -> None:
        self._before = None
        self.good_windows += 1
        if self.good_windows == self.windows_to_grow:
            self.value *= 2
            self.good_windows = 0


@dataclass(frozen=True)
class Closed:
    """What became of a window.

    Where `applied` is false, weights, optimizer and gradients are as they were before the window. With
    `overflow` the same window is to be replayed, at the loss scale that was lowered; with `refused` its
    numbers are finite, and `accept` would not have them.
    """

    loss: float
    """The mean over the window's target tokens, unscaled."""
    grad_norm: float
    """Global norm of the whole window's gradient, before clipping."""
    applied: bool
    overflow: bool = False
    refused: bool = False
    micro_batches: int = 0
    share: float = 0.0
    """The sum of what was added as `share`."""
    tapped_norm: float | None = None
    """The gradient's norm when `tap()` was called."""
    micro_losses: tuple[float, ...] = ()
    """Each micro-batch's part of `loss`; only where asked for."""
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    """The norm of each layer's gradient before clipping; only where asked for."""
    seconds: float = 0.0
    """Wall time since `open()`."""
    optimizer_seconds: float = 0.0
    """The host's time in the optimizer; on a GPU that only starts its kernels."""
    synchronise_seconds: float = 0.0
    """Reading the window's sums back, once the device has worked them out."""
    memory_bytes: int = 0
    """In use when the window was closed: allocated on a GPU, resident on a CPU."""


class Window:
    """Accumulates micro-batches and makes one optimizer step of them.

    Args:
        parameters: those that the optimizer trains.
        optimizer: stepped once per window that is finite; its gradients are None after every window.
        clipping: of the gradient, once it is whole.
        loss_scale: for fp16 autocast; null for every other precision.
        gradients: where gradients are summed; null: in place.
        layers: parameters by layer, for `Closed.layer_norms`.
        keep_micro_losses: for `Closed.micro_losses`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        clipping: Clipping = Clipping(),
        loss_scale: LossScale | None = None,
        *,
        gradients: InPlace | Held | None = None,
        layers: Mapping[str, Sequence[Tensor]] | None = None,
        keep_micro_losses: bool = False,
    ) -> None:
        self._gradients = gradients or InPlace(parameters)
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = loss_scale
        self._layers = layers or {}
        self._keep_micro_losses = keep_micro_losses
        self._count = 0
        self._expected: int | None = None
        self._denominator = 1.0
        self._opened = 0.0
        self._loss: Tensor | None = None
        self._share: Tensor | None = None
        self._tapped: Tensor | None = None
        self._micro_losses: list[Tensor] = []

    @property
    def accumulation_step(self) -> int:
        """Micro-batches since `open()`."""
        return self._count

    @property
    def should_update(self) -> bool:
        """Whether as many micro-batches were added as `open()` was told."""
        return self._count == self._expected

    def open(self, denominator: float, micro_batches: int | None = None) -> None:
        """Starts a window whose losses are to be divided by `denominator`, once, as a whole.

        Args:
            denominator: target tokens of the window, or the sum of their weights.
            micro_batches: how many will be added, for `should_update`.

        Raises:
            ValueError: there is nothing to divide by.
        """
        if not denominator > 0:
            raise ValueError(f"a window needs at least one target token, not {denominator:g}")
        self.abandon()
        self._count = 0
        self._denominator = float(denominator)
        self._expected = micro_batches
        self._opened = time.perf_counter()

    def add(self, loss_sum: Tensor, share: Tensor | None = None) -> None:
        """Backward of one micro-batch. Reads nothing back from the device.

        Args:
            loss_sum: the sum of its token losses, a scalar.
            share: a term that is a share of the window's already and is not divided, such as this
                micro-batch's part of a balance loss; a scalar.
        """
        loss = loss_sum / self._denominator
        whole = loss if share is None else loss + share
        (whole * self._scale.value if self._scale else whole).backward()
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if share is not None:
            self._share = share.detach() if self._share is None else self._share + share.detach()
        if self._keep_micro_losses:
            self._micro_losses.append(loss)
        self._count += 1
        if self._clipping.mode == "each_micro_batch" and self._clipping.limit is not None:
            scaled_limit = self._clipping.limit * (self._scale.value if self._scale else 1.0)
            sums = list(self._gradients.sums().values())
            _clip(sums, _norm(_norms(sums)), scaled_limit)

    def tap(self) -> None:
        """Notes the norm of the gradient so far, for `Closed.tapped_norm`. Reads nothing back."""
        norm = _norm(_norms(list(self._gradients.sums().values())))
        self._tapped = norm / self._scale.value if self._scale else norm

    def close(self, accept: Callable[[float], bool] | None = None) -> Closed:
        """Decides with one read from the device whether the window is applied, and applies it.

        Args:
            accept: asked with the window's loss, if that and the gradient are finite; false: not applied.
        """
        assert self._loss is not None, "close() before the first add()"
        sums = self._gradients.sums()
        gradients = list(sums.values())
        if self._scale:
            torch._foreach_mul_(gradients, 1.0 / self._scale.value)
        norms = _norms(gradients)
        norm_on_device = _norm(norms)
        closed = self._read(norm_on_device, dict(zip(sums, norms, strict=True)))
        if not (isfinite(closed.loss) and isfinite(closed.share) and isfinite(closed.grad_norm)):
            overflow = (
                self._scale is not None
                and isfinite(closed.loss + closed.share)
                and self._scale.value > self._scale.smallest
            )
            if self._scale:
                self._scale.overflowed() if overflow else self._scale.not_at_fault()
            return self._ended(closed, overflow=overflow)
        if accept is not None and not accept(closed.loss):
            return self._ended(closed, refused=True)
        if self._clipping.limit is not None:
            if self._clipping.mode == "value":
                torch._foreach_clamp_min_(gradients, -self._clipping.limit)
                torch._foreach_clamp_max_(gradients, self._clipping.limit)
            else:
                _clip(gradients, norm_on_device, self._clipping.limit)
        del sums, gradients
        began = time.perf_counter()
        with record_function("accrue.optimizer"):
            self._gradients.deliver()
            self._optimizer.step()
        seconds = time.perf_counter() - began
        if self._scale:
            self._scale.held()
        return self._ended(closed, applied=True, optimizer_seconds=seconds)

    def finite(self) -> bool:
        """Whether loss and gradient so far are finite; the window is abandoned."""
        assert self._loss is not None, "finite() before the first add()"
        norm = _norm(_norms(list(self._gradients.sums().values())))
        loss = self._loss if self._share is None else self._loss + self._share
        finite = bool((loss.isfinite() & norm.to(loss.device).isfinite()).item())
        self.abandon()
        return finite

    def abandon(self) -> None:
        """Forgets what was accumulated; weights and optimizer are untouched."""
        self._gradients.forget()
        self._loss = self._share = self._tapped = None
        self._micro_losses = []

    def gradient(self) -> dict[Tensor, Tensor]:
        """The gradient summed so far, by parameter, without the loss scale; it stays the window's own."""
        scale = self._scale.value if self._scale else 1.0
        return {p: g / scale if self._scale else g for p, g in self._gradients.sums().items()}

    def _read(self, norm: Tensor, norms: dict[Tensor, Tensor]) -> Closed:
        """The one read from the device."""
        assert self._loss is not None
        layers = {
            name: own
            for name, parameters in self._layers.items()
            if (own := [norms[p] for p in parameters if p in norms])
        }
        values = [self._loss, norm, *([] if self._share is None else [self._share])]
        values += [] if self._tapped is None else [self._tapped]
        values += [*self._micro_losses, *(_norm(own) for own in layers.values())]
        wider = torch.promote_types(norm.dtype, self._loss.dtype)
        with record_function("accrue.synchronise"):
            together = torch.stack([value.to(self._loss.device, wider) for value in values])
            if together.is_cuda:
                torch.cuda.current_stream(together.device).synchronize()  # the wait for forward and backward
            began = time.perf_counter()
            numbers = iter(together.tolist())
            seconds = time.perf_counter() - began
        return Closed(
            loss=next(numbers),
            grad_norm=next(numbers),
            applied=False,
            micro_batches=self._count,
            share=0.0 if self._share is None else next(numbers),
            tapped_norm=None if self._tapped is None else next(numbers),
            micro_losses=tuple(next(numbers) for _ in self._micro_losses),
            layer_norms={name: next(numbers) for name in layers},
            synchronise_seconds=seconds,
        )

    def _ended(
        self,
        closed: Closed,
        *,
        applied: bool = False,
        overflow: bool = False,
        refused: bool = False,
        optimizer_seconds: float = 0.0,
    ) -> Closed:
        assert self._loss is not None
        device, seconds = self._loss.device, time.perf_counter() - self._opened
        self.abandon()
        return Closed(
            **{
                **vars(closed),
                "applied": applied,
                "overflow": overflow,
                "refused": refused,
                "optimizer_seconds": optimizer_seconds,
                "seconds": seconds,
                "memory_bytes": memory.in_use(device),
            }
        )


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each, at least in fp32."""
    if not gradients:
        return []
    wider = torch.promote_types(gradients[0].dtype, torch.float32)
    return list(torch._foreach_norm(gradients, 2, wider))


def _norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all together."""
    if not norms:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return norm


def _clip(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scales the gradients down to a norm of at most `limit`, as torch's clip_grad_norm_ does."""
    if gradients:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
