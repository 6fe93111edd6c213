"""Recognises loss spikes, names the samples at fault, and decides when to give up."""

import hashlib
from collections.abc import Callable
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workers.training.devices.device_errors import is_out_of_memory, memory_of_others
from workers.training.exceptions import CannotTrain
from workers.training.recovery.decision import Totals, Verdict
from workers.training.window import Window, WindowResult

MAX_SKIPPED_IN_A_ROW = 10
"""The number of consecutive skipped windows after which the job ends."""

RECENT = 50
"""The number of recent windows that a loss is compared with."""

MIN_RECENT = 10

_ROUNDING = 1e-5
"""By how much two computations of the same loss may differ, relative to it."""

_DIGEST_ELEMENTS = 2**18
"""The number of elements of each parameter that a digest contains; of a smaller one, all."""

Indices = npt.NDArray[np.int64]


def close_window(window: Window, totals: Totals, verdict: Verdict) -> WindowResult:
    """Applies a window, or discards it.

    Raises:
        CannotTrain: the optimizer's step itself runs out of memory, which smaller micro-batches cannot fix.
    """
    try:
        return window.finish(totals, verdict)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CannotTrain(
            "out_of_memory",
            "out of memory in the optimizer's step, which does not depend on the micro-batch: "
            f"{memory_of_others()}freeze some of "
            "the model, choose adafactor or lora, or use a GPU with more memory",
        ) from None


def samples_at_fault(
    window: Window, add: Callable[[int], None], samples: Indices, interrupted: Callable[[], bool]
) -> list[int]:
    """The samples whose loss or gradient is not finite by itself; each one runs alone.

    Args:
        add: opens the window and adds one sample to it.
        samples: those of the window that was not applied, without those that have no target.
        interrupted: ends the search early, with what was found so far.
    """
    faults = []
    for sample in samples.tolist():
        if interrupted():
            break
        add(sample)
        if not window.is_finite():
            faults.append(sample)
        window.abandon()
    return faults


def spike_filter(losses: list[float], threshold: float) -> Callable[[float], bool]:
    """Returns a function that accepts a loss unless it is a spike, which is more than `threshold` standard
    deviations (a z-score) above the mean of recent losses, and by more than rounding. It accepts every loss
    while fewer than MIN_RECENT are known."""

    def accept(loss: float) -> bool:
        recent = losses[-RECENT:]
        if len(recent) < MIN_RECENT:
            return True
        mean = fmean(recent)
        return loss - mean <= max(threshold * pstdev(recent), _ROUNDING * abs(mean))

    return accept


def give_up_after_too_many(skipped_in_a_row: int) -> None:
    """Ends the job after too many skipped windows.

    Raises:
        CannotTrain: too many windows in a row were skipped.
    """
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise CannotTrain(
            "diverged",
            f"{MAX_SKIPPED_IN_A_ROW} windows in a row were skipped: lower the learning rate, "
            "and check the samples that the events list",
        )


def check_any_step(step: int) -> None:
    """Checks that the run trained its model.

    Raises:
        CannotTrain: every window was skipped.
    """
    if step == 0:
        raise CannotTrain(
            "nothing_to_learn",
            "every window was skipped, so the model is untrained: the events name the samples at fault",
        )


def digest_of_weights(model: nn.Module) -> str:
    """A digest of evenly spread elements of every trainable parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.detach().flatten()
            spread = flat[:: -(-flat.numel() // _DIGEST_ELEMENTS) or 1].contiguous().cpu()
            digest.update(name.encode() + spread.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_weights_changed(model: nn.Module, before: str | None) -> None:
    """Checks that the trained model is not the base model.

    Args:
        before: the digest of the base model's weights; None if it is unknown.

    Raises:
        CannotTrain: no weight has changed.
    """
    if before is not None and digest_of_weights(model) == before:
        raise CannotTrain(
            "nothing_to_learn",
            "no step changed any weight, so the model is the base model: raise learning_rate, make the "
            "warmup (warmup_steps or warmup_ratio) shorter than the run, or check gradient_clipping and the "
            "weights of the samples (with kto, desirable_weight and undesirable_weight)",
        )
