"""Lays samples out without padding, where attention over such rows costs little.

Micro-batches need no padding if all of their samples are in one row, and attention is computed sample by
sample. The cost of a packed row is then just that of its tokens, however their lengths differ. So a job that
did not ask for packing gets it too, if the model keeps samples apart (packing_check.py), and if the gradient
stays as it is (selection.py). Like any cut into micro-batches, this does not change the training.

On a GPU, this needs a kernel for such rows. On a CPU, samples of similar length are padded for attention
alone (sample_groups.py). In models that are wide enough, this takes less time than padding whole
micro-batches.
"""

import contextlib
from dataclasses import replace

from app.contract.assignment import Assignment
from app.contract.plan import TokenBudget
from app.contract.spec import Spec
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.checkpoints.state import Fallbacks
from workers.training.checks.packing_check import TOO_LITTLE_MEMORY, Layouts, most_samples, why_not_packed
from workers.training.data.batch_loader import Loader
from workers.training.devices import device_errors
from workers.training.distributed.group import Group
from workers.training.kernels.selection import (
    BoundaryAttention,
    Kernels,
    attention_of_each_sample,
    base_of,
    flash_attention,
    may_replace_kernels,
    use_if_it_agrees,
)
from workers.training.replica import Replica

LONGEST_ROW = 2**14
"""The most tokens of a row for which the model is checked, unless a single sample is longer. More would make
no GPU faster."""

LEAST_WIDTH_ON_CPU = 128
"""The least width of a model whose samples are laid out without padding on a CPU: with samples like Alpaca's,
models with a width of 128 to 768 computed forward and backward 1.01 to 1.09 times as fast as with padding,
and with long documents 0.98 to 1.06 times."""

_MOST_OPERATIONS_ON_CPU = 1e12
"""The most floating-point operations of the check on a CPU: some ten seconds."""

_LEAST_LIMIT, _LEAST_LIMIT_OF_TUNING = 512, 1024
"""A model is not checked on a CPU if its rows would be limited to fewer tokens than this, although the plan
may lead to longer ones: the second number applies if budgets are tuned, and so may grow."""


def choose_layout(
    run: RunDirectory,
    replica: Replica,
    loader: Loader,
    assignment: Assignment,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
    planned_tokens: int,
) -> int | None:
    """Changes the loader's layout to packed rows, if attention can be computed for each sample on its own and
    the checks pass. Returns the most tokens that a row may have, or None if samples stay padded.

    Args:
        planned_tokens: tokens of the largest micro-batch that the plan may lead to.

    Raises:
        RuntimeError: the device failed; the next attempt pads samples.
    """
    padded, spec = loader.layout, assignment.spec
    if fallbacks.padded or not _may_be_packed(replica, loader, assignment, group):
        return None
    is_tuned = spec.tune is not None
    most_tokens = _longest_row(replica, loader.longest, planned_tokens, is_tuned=is_tuned)
    if most_tokens is None:
        return None
    own = next((each for each in replica.kernels if isinstance(each, BoundaryAttention)), None)
    kernel = own or _kernel_for(replica, spec, loader.longest)
    on_gpu = replica.device.type == "cuda"
    if kernel is None or (on_gpu and run.was_ended_while_comparing_kernels(group.rank)):
        return None
    if not on_gpu and fallbacks.unpadded is not None:  # so that a resume is the same to the bit
        return _as_before(kernel, replica, loader, most_tokens) if fallbacks.unpadded else None
    loader.layout = replace(padded, packed=True)
    with run.comparing_kernels(group.rank) if on_gpu else contextlib.nullcontext():
        layouts = Layouts(loader.layout, padded)
        reason = _why_padded(replica, loader, layouts, most_tokens, most_samples(spec), fallbacks, group)
        is_used = reason is None and _use_if_right(kernel, replica, loader, reporter)
    if not on_gpu:  # where the comparison is repeated by every attempt
        fallbacks.unpadded = is_used
    if is_used:
        reporter.event(
            "unpadded", "Samples are not padded: attention is computed for each sample on its own.", used=True
        )
        return most_tokens
    loader.layout = padded
    if reason is None and own is not None:
        reason = f"{own.name} is used for padded rows only."
    if reason is not None:
        reporter.event("unpadded", f"Samples are padded. {reason}", used=False)
    return None


def _as_before(kernel: Kernels, replica: Replica, loader: Loader, most_tokens: int) -> int:
    """Lays samples out as an earlier attempt did, without another comparison."""
    kernel.switch_on()
    replica.kernels = (*replica.kernels, kernel)
    loader.layout = replace(loader.layout, packed=True)
    return most_tokens


def _longest_row(replica: Replica, longest: int, planned_tokens: int, *, is_tuned: bool) -> int | None:
    """Tokens of the longest row for which a model is checked. None: the check would take too long.

    Args:
        longest: tokens of the longest sample.
    """
    needed = min(LONGEST_ROW, planned_tokens)
    if replica.device.type == "cuda":
        return max(longest, needed)
    weights: int = sum(each.numel() for each in replica.model.parameters())
    most = int(_MOST_OPERATIONS_ON_CPU / (6.0 * weights))
    least = _LEAST_LIMIT_OF_TUNING if is_tuned else _LEAST_LIMIT
    if most < max(longest, min(needed, least)):
        return None
    return max(longest, min(needed, most))


def _kernel_for(replica: Replica, spec: Spec, longest: int) -> Kernels | None:
    """What computes attention sample by sample on the device of a replica; None if that would cost more than
    it saves."""
    if replica.device.type == "cuda":
        return flash_attention(replica, spec, packed=True, longest=longest)
    width = getattr(base_of(replica.model).config.get_text_config(), "hidden_size", 0)
    if width < LEAST_WIDTH_ON_CPU:
        return None
    return attention_of_each_sample(replica, spec, longest)


def _why_padded(
    replica: Replica,
    loader: Loader,
    layouts: Layouts,
    most_tokens: int,
    most: int,
    fallbacks: Fallbacks,
    group: Group,
) -> str | None:
    """Why samples cannot be packed, as a sentence. What was found is remembered, unless memory ran out.

    Args:
        most: samples of the largest window.
    """
    if fallbacks.padded is False and fallbacks.packed_tokens >= most_tokens:
        return None
    try:
        reason = why_not_packed(replica, loader, layouts, most_tokens, most, group)
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error):
            raise
    else:
        fallbacks.padded = reason is not None
        if reason is None:
            fallbacks.packed_tokens = most_tokens
        return reason
    replica.free_memory()  # what failed is free only after the block above
    return TOO_LITTLE_MEMORY


def _use_if_right(kernel: Kernels, replica: Replica, loader: Loader, reporter: Reporter) -> bool:
    """Whether a kernel gives the right gradient of packed rows; it is used then. A kernel that was
    already in use for padded rows stays in use for them either way."""
    before = replica.kernels
    replica.kernels = tuple(each for each in before if each is not kernel)
    use_if_it_agrees(kernel, replica, loader, reporter)
    if kernel in replica.kernels:
        return True
    replica.kernels = before
    if kernel in before:
        kernel.switch_on()
    return False


def _may_be_packed(replica: Replica, loader: Loader, assignment: Assignment, group: Group) -> bool:
    """Whether packed rows could be used without changing the training or the plan."""
    spec, layout = assignment.spec, loader.layout
    rules = [rank.micro_batch_rule for rank in assignment.plan.ranks]
    return (
        may_replace_kernels(replica, spec)
        and group.size == 1
        and replica.balance is None
        and not (layout.packed or layout.buckets)
        and spec.clip_mode != "each_micro_batch"  # where the cut determines the training
        and all(isinstance(rule, TokenBudget) for rule in rules)
    )
