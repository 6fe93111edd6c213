"""Recognises why windows fail, names the samples at fault, and decides when to give up."""

import hashlib
import re
from collections.abc import Callable
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from app.contract.plan import Plan
from workers.training.decision import Totals, Verdict
from workers.training.exceptions import CannotTrain
from workers.training.memory import GIB
from workers.training.window import Window, WindowResult

MAX_SKIPPED_IN_A_ROW = 10
"""The number of consecutive skipped windows after which the job ends."""

RECENT = 50
"""The number of recent windows that a loss is compared with."""

MIN_RECENT = 10

_DIGEST_ELEMENTS = 2**18
"""The number of elements of each parameter that a digest contains; of a smaller one, all."""

Indices = npt.NDArray[np.int64]


def finish(window: Window, totals: Totals, verdict: Verdict) -> WindowResult:
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
            "out of memory in the optimizer's step, which does not depend on the micro-batch: freeze some of "
            "the model, choose adafactor or lora, or use a GPU with more memory",
        ) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the host, had no memory left.

    What takes memory beside PyTorch's allocator (CUDA's libraries, compiled kernels, pinned memory) fails
    with errors of other kinds.
    """
    return isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|(CUDA|HIP)\b[^\n]{0,40}out of memory|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|NVRTC)_[A-Z_]*"
    r"(ALLOC_FAILED|OUT_OF_MEMORY)",
    re.IGNORECASE,
)


_PASSING = (
    "cublas", "cudnn", "cusolver", "nccl", "cuda error", "cuda driver", "bad_alloc", "cannot allocate",
    "can't allocate", "out of memory", "start new thread", "shared memory", "too many open files",
    "no space left", "connection",
)  # fmt: skip
"""Parts of messages of errors that the machine causes, not the model."""


def may_pass(error: RuntimeError) -> bool:
    """Whether an error is one of the machine, after which another attempt may succeed."""
    text = str(error).lower()
    passing = any(sign in text for sign in _PASSING)
    return passing or is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def samples_at_fault(
    window: Window, add: Callable[[int], None], samples: Indices, stop: Callable[[], bool]
) -> list[int]:
    """The samples whose loss or gradient is not finite by itself; each one runs alone.

    Args:
        add: opens the window and adds one sample to it.
        samples: those of the window that was not applied, without those that have no target.
        stop: ends the search early, with what was found so far.
    """
    faults = []
    for sample in samples.tolist():
        if stop():
            break
        add(sample)
        if not window.finite():
            faults.append(sample)
    return faults


def spike_filter(losses: list[float], threshold: float) -> Callable[[float], bool]:
    """Returns a function that accepts a loss unless it is a spike, which is more than `threshold` standard
    deviations (a z-score) above the mean of recent losses. It accepts every loss while fewer than
    MIN_RECENT are known."""

    def accept(loss: float) -> bool:
        recent = losses[-RECENT:]
        if len(recent) < MIN_RECENT:
            return True
        return loss - fmean(recent) <= threshold * pstdev(recent)

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
            "no step changed any weight, so the model is the base model: raise learning_rate, or make "
            "warmup_steps shorter than the run",
        )


def out_of_memory_error(plan: Plan, samples: int, tokens: int) -> CannotTrain:
    """The error of a job whose smallest micro-batch does not fit, with changes that would help."""
    requested = "set auto_adjust_batch_size to true, " if samples > 1 else ""
    where = (
        f"at a micro-batch of {samples} sample{'s' * (samples > 1)} and {tokens} tokens"
        if samples
        else "on a device without a micro-batch in this window"
    )
    return CannotTrain(
        "out_of_memory",
        f"out of memory {where}, even with gradient checkpointing: {requested}{_remedies(plan)}",
    )


def start_out_of_memory_error(plan: Plan) -> CannotTrain:
    """The error of a job whose model does not fit, or cannot be checked on one sample."""
    rank = plan.ranks[0]
    return CannotTrain(
        "out_of_memory",
        "out of memory before the first step, when the model was loaded and checked on one sample (the plan "
        f"expects {rank.predicted_peak_bytes / GIB:.2f} GiB for a step, and "
        f"{rank.memory_limit_bytes / GIB:.2f} GiB may be used): {_remedies(plan)}",
    )


def _remedies(plan: Plan) -> str:
    remedies = [
        f"{other.change} ({other.one_sample_bytes / GIB:.2f} GiB)"
        for other in plan.alternatives
        if not other.change.startswith("gradient_checkpointing")
    ]
    return (
        "use a GPU with more memory, or make one of these changes (predicted peak for one sample): "
        f"{'; '.join(remedies) or 'a smaller model'}"
    )
