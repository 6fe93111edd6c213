"""Decides whether a window is applied, replayed or skipped.

With several devices, the decision is made once for all, so that none continues while another replays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isfinite


class Verdict(Enum):
    """The decision on a window that was accumulated, or that could not be."""

    APPLY = auto()
    """The optimizer makes its step."""
    INTERRUPT = auto()
    """An interruption was requested: nothing is applied, and a resume begins with this window."""
    REPLAY_IN_LESS_MEMORY = auto()
    """It ran out of memory."""
    REPLAY_AT_LOWER_LOSS_SCALE = auto()
    """The loss is finite, and its scaled fp16 gradient is not."""
    SKIP_NOT_FINITE = auto()
    """Its loss or its gradient is not finite, whatever the scale."""
    SKIP_SPIKE = auto()
    """Its loss is finite, and too far above the recent ones."""


@dataclass(frozen=True)
class Totals:
    """A window's sums, read from the device once."""

    loss: float
    """The window's loss divided by its denominator, unscaled."""
    grad_norm: float
    """Global norm of the whole window's gradient, before clipping."""
    extra_loss: float = 0.0
    """The sum of the `extra_loss` arguments of `Window.add()`, such as a load-balancing loss."""
    first_norm: float | None = None
    """The gradient's norm when `record_first_norm()` was called."""
    micro_losses: tuple[float, ...] = ()
    """Each micro-batch's part of `loss`; only if requested."""
    measured: tuple[float, ...] = ()
    """The sums of the `measured` arguments of `Window.add()`, not divided by the denominator."""
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    """The norm of each layer's gradient before clipping; only if requested."""
    micro_batches: int = 0
    synchronise_seconds: float = 0.0
    """The time for reading the sums back, after the device has computed them."""


@dataclass(frozen=True)
class WindowOutcome:
    """What happened while a window was accumulated; `totals` is None if it was not completed."""

    totals: Totals | None = None
    out_of_memory_on: tuple[int, ...] = ()
    """The ranks that ran out of memory."""
    interruption_requested: bool = False


def decide(
    outcome: WindowOutcome, *, scale_can_fall: bool = False, accept: Callable[[float], bool] | None = None
) -> Verdict:
    """Decides what happens with a window.

    Args:
        scale_can_fall: whether there is a loss scale above its minimum.
        accept: whether a finite loss may be trained on; None accepts any.
    """
    if outcome.interruption_requested:
        return Verdict.INTERRUPT
    if outcome.out_of_memory_on:
        return Verdict.REPLAY_IN_LESS_MEMORY
    totals = outcome.totals
    assert totals is not None, "a window is complete, or one of the above"
    if not isfinite(totals.loss + totals.extra_loss):
        return Verdict.SKIP_NOT_FINITE
    if not isfinite(totals.grad_norm):
        return Verdict.REPLAY_AT_LOWER_LOSS_SCALE if scale_can_fall else Verdict.SKIP_NOT_FINITE
    if accept is not None and not accept(totals.loss):
        return Verdict.SKIP_SPIKE
    return Verdict.APPLY
