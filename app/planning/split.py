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
                f"this makes an effective batch of {samples} samples, more than {MAX_EFFECTIVE_BATCH}: lower "
                "accumulation_steps or micro_batch_size",
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
            f"set it to true, or leave the other numbers out and set micro_batch_size to {per_device}",
        )
    return ResolvedBatch(resolved.effective_batch_size, 1, per_device)


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a device: their sizes in samples differ by at most one, larger ones first. There
    may be a million of them, so they are not listed until they are needed."""

    samples: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def largest(self) -> int:
        """The size of the largest; 0 if there is none."""
        return ceil(self.samples / self.count) if self.count else 0

    @property
    def smallest(self) -> int:
        """The size of the smallest; 0 if there is none."""
        return self.samples // self.count if self.count else 0

    def sizes(self, most: int | None = None) -> list[int]:
        """The sizes of all, or of the first `most`.

        >>> MicroBatches(30, 4).sizes()
        [8, 8, 7, 7]
        """
        larger = self.samples - self.count * self.smallest
        listed = self.count if most is None else min(most, self.count)
        return [self.smallest + (number < larger) for number in range(listed)]

    def chosen(self, places: slice) -> "MicroBatches":
        """The micro-batches at these positions.

        >>> MicroBatches(30, 4).chosen(slice(1, None, 2)).sizes()
        [8, 7]
        """
        larger = self.samples - self.count * self.smallest
        count = len(range(self.count)[places])
        return MicroBatches(count * self.smallest + len(range(larger)[places]), count)


NO_MICRO_BATCH = MicroBatches(0, 0)


def even(samples: int, parts: int) -> MicroBatches:
    """Divides samples into parts whose sizes differ by at most one; no part is empty."""
    return MicroBatches(samples, min(samples, parts))


def split_over(target: int, capacities: Sequence[int]) -> list[MicroBatches]:
    """The micro-batches of each device: as few steps as the capacities allow, evened out.

    Args:
        target: samples of one optimizer step.
        capacities: the largest micro-batch of each device, in samples, each at least 1.

    Returns:
        The micro-batches of each device; together they have `target` samples.
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
