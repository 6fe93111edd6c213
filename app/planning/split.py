"""Turns the numbers of a request into an effective batch, and an effective batch into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from app.contract.accumulation import MAX_ACCUMULATION_STEPS, MAX_EFFECTIVE_BATCH

DEFAULT_MICRO_BATCH = 8
"""Samples per micro-batch if only the number of steps is given."""


class ConflictingBatch(ValueError):
    """The given numbers contradict each other; `field` names the one to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class RequestedBatch:
    """The numbers in a request (None: not given), and the number of devices."""

    target: int | None
    steps: int | None
    micro_batch: int | None
    devices: int = 1


@dataclass(frozen=True)
class ResolvedBatch:
    """The effective batch in samples, and the requested micro-batches (None: planned)."""

    effective_batch_size: int
    steps: int | None
    micro_batch: int | None


def resolve(requested: RequestedBatch, recommended: int) -> ResolvedBatch:
    """Resolves three optional numbers into an effective batch and a split.

    The effective batch is the target if that is given. Otherwise it is steps × micro-batch × devices,
    with 1 step or `DEFAULT_MICRO_BATCH` samples in place of a missing number, or `recommended` if both are
    missing.

    Args:
        recommended: the effective batch where no number was given.

    Raises:
        ConflictingBatch: all three are given and do not agree, or the effective batch is too large.
    """
    target, steps, micro = requested.target, requested.steps, requested.micro_batch
    if target and steps and micro:
        needed = ceil(target / (micro * requested.devices))
        if steps != needed:
            raise ConflictingBatch(
                "accumulation_steps",
                f"target_effective_batch_size {target} with micro_batch_size {micro} on {requested.devices} "
                f"device{'s' * (requested.devices > 1)} takes {needed} accumulation steps, not {steps}: "
                "leave one of the three out, or make them agree",
            )
    if target:
        return ResolvedBatch(target, steps, micro)
    if steps or micro:
        samples = (steps or 1) * (micro or DEFAULT_MICRO_BATCH) * requested.devices
        if samples > MAX_EFFECTIVE_BATCH:
            raise ConflictingBatch(
                "accumulation_steps" if steps else "micro_batch_size",
                f"this makes an effective batch of {samples} samples, more than {MAX_EFFECTIVE_BATCH}",
            )
        return ResolvedBatch(samples, steps or 1, micro)
    return ResolvedBatch(recommended, None, None)


def without_accumulation(requested: RequestedBatch, recommended: int) -> ResolvedBatch:
    """The effective batch if accumulation is turned off: one micro-batch per device is the whole step.

    Raises:
        ConflictingBatch: more than one accumulation step is requested, or follows from the other numbers.
    """
    resolved = resolve(requested, requested.micro_batch or recommended)
    per_device = ceil(resolved.effective_batch_size / requested.devices)
    if (requested.steps or 1) > 1 or (requested.micro_batch or per_device) < per_device:
        raise ConflictingBatch(
            "use_gradient_accumulation",
            "use_gradient_accumulation is false, but the given numbers need several micro-batches per step: "
            f"set it to true, or set only micro_batch_size, to {per_device}",
        )
    return ResolvedBatch(resolved.effective_batch_size, 1, per_device)


def even(samples: int, parts: int) -> list[int]:
    """Divides samples into parts whose sizes differ by at most one, larger parts first; no part is empty.

    >>> even(30, 4)
    [8, 8, 7, 7]
    """
    parts = min(samples, parts)
    if parts == 0:
        return []
    small, larger = divmod(samples, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def split_over(target: int, capacities: Sequence[int]) -> list[list[int]]:
    """The micro-batches of each device: as few steps as the capacities allow, evened out.

    Args:
        target: samples of one optimizer step.
        capacities: the largest micro-batch of each device, in samples, each at least 1.

    Returns:
        For each device its micro-batch sizes; they sum to the target over all devices.
    """
    steps = ceil(target / sum(capacities))
    taken = shares(target, [steps * capacity for capacity in capacities])
    return [even(share, ceil(share / capacity)) for share, capacity in zip(taken, capacities, strict=True)]


def shares(target: int, limits: Sequence[int]) -> list[int]:
    """Divides the target into integers in proportion to the limits, none above its limit."""
    total = sum(limits)
    found = [target * limit // total for limit in limits]
    by_remainder = sorted(range(len(limits)), key=lambda i: -(target * limits[i] % total))
    for i in by_remainder[: target - sum(found)]:
        found[i] += 1
    return found


def check_steps(steps: int, micro_batch: int) -> None:
    """Checks the number of accumulation steps.

    Raises:
        ConflictingBatch: there are more than `MAX_ACCUMULATION_STEPS`.
    """
    if steps > MAX_ACCUMULATION_STEPS:
        raise ConflictingBatch(
            "target_effective_batch_size",
            f"with micro-batches of {micro_batch} this takes {steps} accumulation steps, more than "
            f"{MAX_ACCUMULATION_STEPS}: lower the effective batch, or raise the micro-batch",
        )
