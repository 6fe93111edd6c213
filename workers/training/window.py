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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import sqrt
from typing import Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from workers.training.devices import memory
from workers.training.devices.stopwatch import Stopwatch
from workers.training.distributed.group import ALONE, Group
from workers.training.gradients.gradient_sums import Gradients, InPlace
from workers.training.recovery.decision import Totals, Verdict, WindowOutcome, decide


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped; they are not if `limit` is None."""

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
    """The loss scale at which the current window first overflowed."""

    @property
    def value_before_window(self) -> float:
        """The scale at which the current window began, which a checkpoint keeps: after a resume, the whole
        window runs again."""
        return self._before or self.value

    def overflowed(self) -> None:
        self._before = self._before or self.value
        self.value = max(self.smallest, self.value / 2)
        self.good_windows = 0

    def restore(self) -> None:
        """Restores the scale from before this window, since no scale makes the window finite."""
        self.value, self._before = self._before or self.value, None

    def note(self, verdict: Verdict) -> None:
        """Adjusts the scale after a window."""
        match verdict:
            case Verdict.APPLY:
                self.record_success()
            case Verdict.REPLAY_AT_LOWER_LOSS_SCALE:
                self.overflowed()
            case Verdict.SKIP_NOT_FINITE:
                self.restore()
            case Verdict.SKIP_SPIKE:
                self._before = None

    def record_success(self) -> None:
        self._before = None
        self.good_windows += 1
        if self.good_windows == self.windows_to_grow:
            self.value *= 2
            self.good_windows = 0


_SAFE_LOSS_SCALE = 256.0
"""A loss scale for fp16 at which gradients do not overflow."""


@contextmanager
def at_safe_loss_scale(scale: LossScale | None) -> Iterator[None]:
    """Within the block, the loss scale is small: its first value may be too large for any gradient."""
    if scale is None:
        yield
        return
    before, scale.value = scale.value, min(scale.value, _SAFE_LOSS_SCALE)
    try:
        yield
    finally:
        scale.value = before


@dataclass(frozen=True)
class WindowResult(Totals):
    """A window's totals, and the decision on it.

    If `applied` is false, weights, optimizer and gradients are as they were before the window.
    """

    verdict: Verdict = Verdict.APPLY
    seconds: float = 0.0
    """Wall time since `open()`."""
    optimizer_seconds: float = 0.0
    """The device's time in the optimizer. On a GPU, this is the time of the previous window's step: the host
    does not wait for that step, so the GPU computes it mostly while this window runs."""
    memory_bytes: int = 0
    """Memory in use when the window was closed: allocated on a GPU, resident on a CPU."""

    @property
    def applied(self) -> bool:
        """Whether the optimizer made its step."""
        return self.verdict is Verdict.APPLY

    @property
    def overflow(self) -> bool:
        """Whether the window must run again, at the loss scale that was lowered."""
        return self.verdict is Verdict.REPLAY_AT_LOWER_LOSS_SCALE

    @property
    def rejected_by_filter(self) -> bool:
        """Whether the numbers are finite, but `accept` rejected the loss."""
        return self.verdict is Verdict.SKIP_SPIKE


class Window:
    """Accumulates micro-batches and makes one optimizer step from them.

    Args:
        parameters: those that the optimizer trains.
        optimizer: stepped once per window that is finite; its gradients are None after every window.
        clipping: how the window's complete gradient is clipped.
        loss_scale: for fp16 autocast; None for every other precision.
        gradients: where gradients are summed; None sums them in place.
        layers: parameters by layer, for `WindowResult.layer_norms`.
        keep_micro_losses: for `WindowResult.micro_losses`.
        group: the ranks that accumulate the window together; `gradients` must exchange over the same group.
        optimizer_device: where the optimizer's step runs; None: where the parameters are.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        clipping: Clipping = Clipping(),
        loss_scale: LossScale | None = None,
        *,
        gradients: Gradients | None = None,
        layers: Mapping[str, Sequence[Tensor]] | None = None,
        keep_micro_losses: bool = False,
        group: Group = ALONE,
        optimizer_device: torch.device | None = None,
    ) -> None:
        parameters = list(parameters)
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._gradients: Gradients = gradients or InPlace(parameters)
        self._group = group
        self._optimizer = optimizer
        self._clipping = clipping
        self._scale = loss_scale
        self._layers = layers or {}
        self._keep_micro_losses = keep_micro_losses
        self._count, self._passes = 0, 0
        self._expected: int | None = None
        self._expected_passes: int | None = None
        self._micro_batches_before, self._micro_batches_of_all = 0, 0
        self._exchanges_early = False
        self._denominator = 1.0
        self._opened = 0.0
        self._optimizer_watch = Stopwatch(optimizer_device or self._device)
        self._loss: Tensor | None = None
        self._extra_loss: Tensor | None = None
        self._measured: Tensor | None = None
        self._first_norm: Tensor | None = None
        self._grad_norm: Tensor | None = None
        self._micro_losses: list[Tensor] = []

    @property
    def accumulation_step(self) -> int:
        """Micro-batches since `open()`."""
        return self._count

    @property
    def should_update(self) -> bool:
        """Whether all micro-batches that `open()` announced have been added."""
        return self._count == self._expected

    def open(
        self,
        denominator: float,
        micro_batches: int | None = None,
        *,
        passes: int | None = None,
        by_rank: Sequence[int] | None = None,
        exchange_early: bool = False,
        measures: int = 0,
    ) -> None:
        """Starts a window; the sum of its losses is divided once by `denominator`.

        Args:
            denominator: target tokens of the window over all ranks, or the sum of their weights; or samples,
                if the losses are of samples.
            micro_batches: how many this rank will add, for `should_update`.
            passes: its backward passes, if it will also take part in those of others; needed if the model is
                divided.
            by_rank: how many each rank will add.
            exchange_early: whether ranks may exchange gradients during the last backward pass, after which
                this rank's own gradient is not known any more.
            measures: how many numbers `add` gets as `measured` (the same on every rank); 0 for none.

        Raises:
            ValueError: there is nothing to divide by.
        """
        if not denominator > 0:
            raise ValueError(
                f"the denominator must be above 0, not {denominator:g}: no target token, or sample, counts"
            )
        self.abandon()
        self._micro_batches_before = sum((by_rank or ())[: self._group.rank])
        self._micro_batches_of_all = sum(by_rank or ())
        whole = self._clipping.mode == "each_micro_batch" or not exchange_early
        self._exchanges_early = self._gradients.is_sharded or not whole
        self._count, self._passes = 0, 0
        self._denominator = float(denominator)
        self._gradients.open((self._scale.value if self._scale else 1.0) / self._denominator)
        self._expected = micro_batches
        self._expected_passes = passes or micro_batches
        if measures:
            self._measured = torch.zeros(measures, dtype=torch.float64, device=self._device)
        self._opened = time.perf_counter()

    def add(self, loss_sum: Tensor, extra_loss: Tensor | None = None, measured: Tensor | None = None) -> None:
        """Runs the backward pass of one micro-batch. Reads nothing back from the device.

        Args:
            loss_sum: the sum of its token losses, a scalar.
            extra_loss: a further term of the window's loss that is not divided by the denominator, such as
                this micro-batch's share of a load-balancing loss; a scalar.
            measured: numbers to sum over the window and its ranks, see `WindowResult.measured`; of shape
                (numbers,), without gradient.
        """
        self._begin_pass()
        loss = loss_sum / self._denominator
        whole = loss if extra_loss is None else loss + extra_loss
        (whole * self._scale.value if self._scale else whole).backward()
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if extra_loss is not None:
            self._extra_loss = (
                extra_loss.detach() if self._extra_loss is None else self._extra_loss + extra_loss.detach()
            )
        if measured is not None:
            self._measured = measured if self._measured is None else self._measured + measured
        if self._keep_micro_losses:
            self._micro_losses.append(loss)
        self._count += 1
        if self._clipping.mode == "each_micro_batch" and self._clipping.limit is not None:
            scaled_limit = self._clipping.limit * (self._scale.value if self._scale else 1.0)
            sums = list(self._gradients.sums().values())
            _clip(sums, _norm(_norms(sums)), scaled_limit)

    def add_nothing(self, nothing: Tensor) -> None:
        """Runs the backward pass of a loss of zero, with which this rank takes part in that of others."""
        self._begin_pass()
        nothing.backward()

    def _begin_pass(self) -> None:
        self._passes += 1
        if self._exchanges_early and self._passes == self._expected_passes:
            self._gradients.begin_last()

    def wait_until_added(self) -> None:
        """Waits for gradients that are still being added after the last backward pass. Called where running
        out of memory is handled."""
        self._gradients.wait_until_added()

    def record_first_norm(self) -> None:
        """Records the norm of the gradient so far as `WindowResult.first_norm`. Reads nothing back from the
        device."""
        norm = _norm(_norms(list(self._gradients.sums().values())))
        self._first_norm = norm / self._scale.value if self._scale else norm

    def close(self, accept: Callable[[float], bool] | None = None) -> WindowResult:
        """Decides with one read from the device whether the window is applied, and applies it.

        Args:
            accept: called with the loss if loss and gradient are finite; returns False to skip the window.
        """
        outcome = self.sum_over_ranks()
        assert outcome.totals is not None, "every rank closes a window that it has accumulated"
        verdict = decide(outcome, scale_can_fall=self.scale_can_fall, accept=accept)
        return self.finish(outcome.totals, verdict)

    def sum_over_ranks(
        self, *, out_of_memory: bool = False, interruption_requested: bool = False
    ) -> WindowOutcome:
        """Sums the window over all ranks. Every rank calls it once per window, even if it failed.

        Args:
            out_of_memory: whether this rank ran out of memory.
            interruption_requested: whether an interruption was requested on this rank.

        Returns:
            What happened on any rank; the totals are None if any of them failed.
        """
        failed = self.exchange(out_of_memory=out_of_memory, interruption_requested=interruption_requested)
        return failed or WindowOutcome(self.totals())

    def exchange(
        self, *, out_of_memory: bool = False, interruption_requested: bool = False
    ) -> WindowOutcome | None:
        """Replaces the gradient by its sum over all ranks: the first part of `sum_over_ranks()`.

        Returns:
            What happened if any rank failed, and the window was abandoned; None if all did their part.
        """
        group = self._group
        failed = [out_of_memory and rank == group.rank for rank in range(group.size)]
        present = self._gradients.present() if group.size > 1 else []
        stop, *flags = group.any(interruption_requested, *failed, *present)
        out_of_memory_on = tuple(rank for rank in range(group.size) if flags[rank])
        discard = stop or bool(out_of_memory_on)
        if group.size > 1:
            self._gradients.exchange(flags[group.size :], discard=discard)
        if discard:
            self.abandon()
            return WindowOutcome(out_of_memory_on=out_of_memory_on, interruption_requested=stop)
        return None

    @property
    def scale_can_fall(self) -> bool:
        """Whether the loss scale can be lowered after an overflow."""
        return self._scale is not None and self._scale.value > self._scale.smallest

    def totals(self) -> Totals:
        """Returns the window's sums, with one read from the device. It removes the loss scale from the
        gradient, so that no more can be added: call `finish()` next."""
        assert self._loss is not None or self._group.size > 1, "totals() before the first add()"
        sums = self._gradients.sums()
        gradients = list(sums.values())
        if self._scale:
            torch._foreach_mul_(gradients, 1.0 / self._scale.value)
        norms = _norms(gradients)
        self._grad_norm = _norm(norms)
        totals = self._read(self._grad_norm, dict(zip(sums, norms, strict=True)))
        if self._group.size > 1:  # the factor of clipping is the same on all ranks
            self._grad_norm = torch.full_like(self._grad_norm, totals.grad_norm)
        return totals

    def finish(self, totals: Totals, verdict: Verdict) -> WindowResult:
        """Applies the window, or discards it and leaves weights and optimizer unchanged."""
        assert self._grad_norm is not None, "finish() before totals()"
        device, watch = self._device, self._optimizer_watch
        seconds = watch.seconds() if watch.lags else 0.0
        if verdict is Verdict.APPLY:
            self._step()
            seconds = seconds if watch.lags else watch.seconds()
        elif watch.lags:
            watch.reset()
        if self._scale:
            self._scale.note(verdict)
        took = time.perf_counter() - self._opened
        self.abandon()
        return WindowResult(
            **vars(totals),
            verdict=verdict,
            seconds=took,
            optimizer_seconds=seconds,
            memory_bytes=memory.in_use(device),
        )

    def _step(self) -> None:
        """Clips the gradient and steps the optimizer."""
        assert self._grad_norm is not None
        gradients = list(self._gradients.sums().values())
        if self._clipping.limit is not None:
            if self._clipping.mode == "value":
                torch._foreach_clamp_min_(gradients, -self._clipping.limit)
                torch._foreach_clamp_max_(gradients, self._clipping.limit)
            else:
                _clip(gradients, self._grad_norm, self._clipping.limit)
        del gradients
        self._optimizer_watch.begin()
        with record_function("accrue.optimizer"):
            self._gradients.assign_to_parameters()
            self._optimizer.step()
        self._optimizer_watch.end()

    def sum_of_parts(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks, if each holds only a part of the gradient."""
        return self._group.sum(numbers) if self._gradients.is_sharded else list(numbers)

    def is_finite(self) -> bool:
        """Whether loss and gradient so far are finite; waits for the device."""
        assert self._loss is not None, "is_finite() before the first add()"
        norm = _norm(_norms(list(self._gradients.sums().values())))
        loss = self._loss if self._extra_loss is None else self._loss + self._extra_loss
        return bool((loss.isfinite() & norm.to(loss.device).isfinite()).item())

    def abandon(self) -> None:
        """Discards what was accumulated; weights and optimizer stay as they are."""
        self._gradients.clear()
        self._loss = self._extra_loss = self._first_norm = self._grad_norm = self._measured = None
        self._micro_losses = []

    def gradient(self) -> dict[Tensor, Tensor]:
        """The gradient summed so far, by parameter, without the loss scale; the tensors still belong to the
        window."""
        scale = self._scale.value if self._scale else 1.0
        return {p: g / scale if self._scale else g for p, g in self._gradients.sums().items()}

    def _read(self, norm: Tensor, norms: dict[Tensor, Tensor]) -> Totals:
        """Reads all numbers from the device at once, and sums those of this rank over all ranks."""
        layers = {
            name: found
            for name, parameters in self._layers.items()
            if (found := [norms[p] for p in parameters if p in norms])
        }
        zero = torch.zeros((), device=self._device)
        values = [zero if self._loss is None else self._loss, norm]
        values += [] if self._extra_loss is None else [self._extra_loss]
        values += [] if self._first_norm is None else [self._first_norm]
        values += [] if self._measured is None else list(self._measured.unbind())
        values += [*self._micro_losses, *(_norm(found) for found in layers.values())]
        wider = torch.promote_types(norm.dtype, values[0].dtype)
        with record_function("accrue.synchronise"), self._group.waiting():
            together = torch.stack([value.to(self._device, wider) for value in values])
            if together.is_cuda:
                torch.cuda.current_stream(together.device).synchronize()  # the wait for forward and backward
            began = time.perf_counter()
            numbers = iter(together.tolist())
            seconds = time.perf_counter() - began
        own = Totals(
            loss=next(numbers),
            grad_norm=next(numbers),
            micro_batches=self._count,
            extra_loss=0.0 if self._extra_loss is None else next(numbers),
            first_norm=None if self._first_norm is None else next(numbers),
            measured=() if self._measured is None else tuple(next(numbers) for _ in self._measured),
            micro_losses=tuple(next(numbers) for _ in self._micro_losses),
            layer_norms={name: next(numbers) for name in layers},
            synchronise_seconds=seconds,
        )
        return own if self._group.size == 1 else self._sum(own)

    def _sum(self, own: Totals) -> Totals:
        """The totals over all ranks. The norms, if all ranks compute them from the same gradient, are rank
        0's: on unequal devices they might differ in the last bit, and with them the decision."""
        leads, divided = self._group.leads, self._gradients.is_sharded
        before, of_all = self._micro_batches_before, self._micro_batches_of_all
        losses = [0.0] * of_all if self._keep_micro_losses else []
        losses[before : before + len(own.micro_losses)] = own.micro_losses
        norms = [own.grad_norm, *own.layer_norms.values()]
        first = own.first_norm if leads else None
        summed = iter(
            self._group.sum(
                [
                    own.loss,
                    own.extra_loss,
                    float(own.micro_batches),
                    0.0 if first is None else 1.0,
                    first or 0.0,
                    *([norm * norm for norm in norms] if divided else norms if leads else [0.0] * len(norms)),
                    *own.measured,
                    *losses,
                ]
            )
        )
        loss, extra_loss, micro_batches, has_first, first_norm = (next(summed) for _ in range(5))
        norm, *of_layers = (
            sqrt(norm) if divided and norm >= 0 else norm for norm in islice(summed, len(norms))
        )
        measured = tuple(islice(summed, len(own.measured)))
        return replace(
            own,
            measured=measured,
            loss=loss,
            extra_loss=extra_loss,
            micro_batches=round(micro_batches),
            first_norm=first_norm if has_first else None,
            grad_norm=norm,
            layer_norms=dict(zip(own.layer_norms, of_layers, strict=True)),
            micro_losses=tuple(summed),
        )


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, at least in fp32."""
    if not gradients:
        return []
    wider = torch.promote_types(gradients[0].dtype, torch.float32)
    return list(torch._foreach_norm(gradients, 2, wider))


def _norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, from their norms."""
    if not norms:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return norm


def _clip(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scales the gradients down to a norm of at most `limit`, as torch's clip_grad_norm_ does."""
    if gradients:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
