"""Recognises errors of a device or the machine, such as having no memory left, and says what to change."""

import re

import torch
import torch.distributed as dist

from app.contract.plan import Plan
from workers.training.devices.memory import GIB
from workers.training.exceptions import CannotTrain


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


_TRANSIENT = (
    "cublas", "cudnn", "cusolver", "nccl", "cuda error", "cuda driver", "bad_alloc", "cannot allocate",
    "can't allocate", "out of memory", "start new thread", "shared memory", "too many open files",
    "no space left", "connection",
)  # fmt: skip
"""Parts of messages of errors that the machine causes, not the model."""


def is_transient(error: RuntimeError) -> bool:
    """Whether an error is one of the machine, after which another attempt may succeed."""
    text = str(error).lower()
    known = any(sign in text for sign in _TRANSIENT)
    return known or is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def out_of_memory_error(plan: Plan, samples: int, tokens: int, *, recomputed: bool = True) -> CannotTrain:
    """The error of a job whose smallest micro-batch does not fit, with changes that would help.

    Args:
        recomputed: whether gradient checkpointing was on; otherwise, the model does not support it.
    """
    requested = "set auto_adjust_batch_size to true, " if samples > 1 else ""
    where = (
        f"at a micro-batch of {samples} sample{'s' * (samples > 1)} and {tokens} tokens, "
        + ("even with" if recomputed else "and the model does not support")
        + " gradient checkpointing"
        if samples
        else "on a device without a micro-batch in this window"
    )
    return CannotTrain(
        "out_of_memory",
        f"out of memory {where}: {memory_of_others()}{requested}{_remedies(plan)}",
    )


def start_out_of_memory_error(plan: Plan) -> CannotTrain:
    """The error of a job whose model does not fit, or cannot be checked on one sample."""
    rank = plan.ranks[0]
    return CannotTrain(
        "out_of_memory",
        "out of memory before the first step, when the model was loaded and checked on one sample (the plan "
        f"expects {rank.predicted_peak_bytes / GIB:.2f} GiB for a step, and "
        f"{rank.memory_limit_bytes / GIB:.2f} GiB may be used): {memory_of_others()}{_remedies(plan)}",
    )


_OWN_CONTEXT = GIB
"""Bytes of a GPU that this process may take in addition to PyTorch's memory, generously."""


def memory_of_others() -> str:
    """The beginning of a sentence about the memory of the current GPU that other processes use; empty if they
    use little of it, or there is no GPU."""
    if not torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized()):
        return ""  # other ranks of the job may use the same GPU
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after some errors, a GPU answers no calls any more
        return ""
    others = total - free - torch.cuda.memory_reserved() - _OWN_CONTEXT
    if others < _OWN_CONTEXT:
        return ""
    return f"other processes use about {others / GIB:.0f} GiB of this GPU: end them, or "


def _remedies(plan: Plan) -> str:
    limit = min(rank.memory_limit_bytes for rank in plan.ranks)
    others = [each for each in plan.alternatives if not each.change.startswith("gradient_checkpointing")]
    fitting = [each for each in others if each.one_sample_bytes <= limit]
    described = "; ".join(
        f"{each.change} ({each.one_sample_bytes / GIB:.2f} GiB)" for each in fitting or others
    )
    if others and not fitting:
        return (
            "use a GPU with more memory. Each of these changes needs less of it, but none is predicted to be "
            f"enough alone ({limit / GIB:.2f} GiB may be used; in brackets, the predicted peak for one "
            f"sample): {described}"
        )
    return (
        "use a GPU with more memory, or make one of these changes (predicted peak for one sample, of "
        f"{limit / GIB:.2f} GiB that may be used): {described or 'a smaller model'}"
    )
