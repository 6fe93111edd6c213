"""The calculator: the largest micro-batch that fits each device, and the split of a target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor

from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.spec import MemoryLimits
from app.planning.devices import GIB, Device
from app.planning.estimate import MOST_ROWS, Estimate, Estimates, compared, largest_micro_batch
from app.planning.memory import Memory
from app.planning.remedies import Change, changes
from app.planning.schemas import Alternative, BatchSizeAnswer, DeviceSplit, MemoryAnswer
from app.planning.speeds import Speeds, SpeedsOf, unmeasured, useful_tokens
from app.planning.split import split_over

DEFAULT_TARGET = 32

_FARTHEST = 2
"""Times the largest micro-batch that was measured: how fast those beyond it are is not known."""


@dataclass(frozen=True)
class Question:
    """A model, a way of training it, and the devices."""

    model_name: str
    architecture: Architecture
    recipe: Recipe
    sequence: int
    limits: MemoryLimits
    devices: Sequence[Device]
    target: int | None
    micro_batch: int | None = None
    """As it is wanted, whether it fits or not; null: the largest that fits and is of use."""
    most: int | None = None
    """The largest micro-batch to consider; null: any that fits."""


@dataclass(frozen=True)
class Largest:
    """The largest micro-batch that fits a device: as a whole window, and as one of several."""

    once: int
    accumulating: int

    def capped(self, most: int | None) -> "Largest":
        """At most so many."""
        return self if most is None else Largest(min(self.once, most), min(self.accumulating, most))

    def with_steps(self, steps: int) -> int:
        return self.once if steps == 1 else self.accumulating


@dataclass(frozen=True)
class RawQuestion:
    """Raw figures instead of a model; bytes."""

    weights_bytes: int
    activation_bytes_per_sample: int
    available_bytes: int
    limits: MemoryLimits
    optimizer_states: float
    devices: int
    target: int | None


def answer(
    question: Question, estimates: Estimates, warnings: list[str], speeds: SpeedsOf = unmeasured
) -> BatchSizeAnswer:
    """The split, by the best estimates there are, in micro-batches no larger than throughput rewards."""
    estimate = estimates(question.recipe, question.sequence)
    measured = speeds(question.recipe, question.sequence)
    largest = [_largest(estimate, device, question.limits) for device in question.devices]
    wanted = question.micro_batch
    useful = [
        _useful(each, measured, question) if wanted is None else Largest(wanted, wanted) for each in largest
    ]
    micro, split = _split(question.target, useful)
    steps = max(map(len, split))
    capacities = [each.with_steps(steps) for each in largest]
    fits = all(rows >= max(own, default=1) for rows, own in zip(capacities, split, strict=True))
    memory = estimate.memory(micro, accumulating=steps > 1)
    beside = compared(estimates, question.architecture, question.recipe, question.sequence)
    alternatives = _alternatives(replace(question, most=wanted), beside, speeds, micro)
    return BatchSizeAnswer(
        model_name=question.model_name,
        parameters=question.architecture.parameters,
        fits=fits,
        actual_batch_size_per_gpu=micro,
        accumulation_steps=steps,
        effective_batch_size=sum(map(sum, split)),
        max_micro_batch_size=max(capacities),
        devices=_devices(question.devices, question.limits, capacities, split),
        memory=_memory(memory),
        source=estimate.source,
        expected_error=estimate.expected_error,
        predicted_samples_per_second=_rate(measured, micro, question),
        alternatives=alternatives,
        explanation=_explain(fits, split, question, estimate, alternatives),
        warnings=warnings,
    )


def advised(answered: BatchSizeAnswer, question: Question) -> Change | None:
    """The least change that fits, where nothing fits as it is and that change is known by formula alone."""
    if answered.fits:
        return None
    least = next((other for other in answered.alternatives if other.fits), None)
    if least is None or least.source != "formula":
        return None
    others = changes(question.recipe, question.sequence)
    return next((change for change in others if change.told == least.change), None)


def answer_raw(question: RawQuestion) -> BatchSizeAnswer:
    """The same from raw figures: weights, their gradients and states, and so much for each sample."""
    fixed = int(question.weights_bytes * (2 + question.optimizer_states))
    budget = question.limits.budget(question.available_bytes)
    room = floor(max(0, budget - fixed) / question.activation_bytes_per_sample)
    devices = [
        Device(number, "as given", question.available_bytes, "cuda") for number in range(question.devices)
    ]
    micro, split = _split(question.target, [Largest(room, room)] * len(devices))
    memory = Memory(
        weights_bytes=question.weights_bytes,
        gradients_bytes=question.weights_bytes,
        optimizer_bytes=int(question.weights_bytes * question.optimizer_states),
        activations_bytes=question.activation_bytes_per_sample * micro,
        logits_bytes=0,
        workspace_bytes=0,
        context_bytes=0,
    )
    fixed_gb, budget_gb = fixed / GIB, budget / GIB
    return BatchSizeAnswer(
        model_name=None,
        parameters=None,
        fits=room > 0,
        actual_batch_size_per_gpu=micro,
        accumulation_steps=max(map(len, split)),
        effective_batch_size=sum(map(sum, split)),
        max_micro_batch_size=room,
        devices=_devices(devices, question.limits, [room] * len(devices), split),
        memory=_memory(memory),
        source="formula",
        expected_error=None,
        alternatives=[],
        explanation=f"Weights, gradients and optimizer states take {fixed_gb:.2f} of the {budget_gb:.2f} GiB "
        f"that may be used; {room} samples fit in the rest.",
        warnings=[] if room else ["not even one sample fits: the figures below are for one"],
    )


def _largest(estimate: Estimate, device: Device, limits: MemoryLimits) -> Largest:
    budget = limits.budget(device.memory_bytes)
    return Largest(
        largest_micro_batch(estimate, budget, accumulating=False), largest_micro_batch(estimate, budget)
    )


def _split(target: int | None, largest: Sequence[Largest]) -> tuple[int, list[list[int]]]:
    """The largest micro-batch used, and each device's micro-batches; as if one sample fitted everywhere."""
    capacities = [max(1, each.accumulating) for each in largest]
    at_once = [max(1, each.once) for each in largest]
    split = split_over(target or min(DEFAULT_TARGET, sum(capacities)), capacities, at_once)
    return max(max(own, default=1) for own in split), split


def _devices(
    devices: Sequence[Device], limits: MemoryLimits, largest: Sequence[int], split: list[list[int]]
) -> list[DeviceSplit]:
    return [
        DeviceSplit(
            gpu_id=device.id,
            name=device.name,
            memory_bytes=device.memory_bytes,
            memory_limit_bytes=limits.budget(device.memory_bytes),
            max_micro_batch_size=rows,
            micro_batch_size=max(own, default=0),
            accumulation_steps=len(own),
            micro_batch_sizes=own,
            samples=sum(own),
        )
        for device, rows, own in zip(devices, largest, split, strict=True)
    ]


def _memory(memory: Memory) -> MemoryAnswer:
    return MemoryAnswer(
        **{name: size for name, size in vars(memory).items() if name.endswith("_bytes")},
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        peak_process_bytes=memory.peak_process_bytes,
    )


def _alternatives(
    question: Question, estimates: Estimates, speeds: SpeedsOf, micro: int
) -> list[Alternative]:
    """What other choices would give: those that fit first, in the order of how little they change.

    Args:
        micro: the micro-batch as it is.
    """
    found = []
    if micro > 1:
        half = replace(question, most=micro // 2)
        found.append(_alternative(f"micro_batch_size: {micro // 2}", half, estimates, speeds))
    for change in changes(question.recipe, question.sequence):
        other = replace(question, recipe=change.recipe, sequence=change.sequence)
        found.append(_alternative(change.told, other, estimates, speeds))
    if question.recipe.device == "cuda":
        more = replace(question, devices=[*question.devices, *question.devices])
        found.append(_alternative(f"devices: {len(more.devices)}", more, estimates, speeds))
    return sorted(found, key=lambda alternative: not alternative.fits)


def _alternative(told: str, question: Question, estimates: Estimates, speeds: SpeedsOf) -> Alternative:
    estimate = estimates(question.recipe, question.sequence)
    measured = speeds(question.recipe, question.sequence)
    largest = [_largest(estimate, device, question.limits) for device in question.devices]
    useful = [_useful(each, measured, question).capped(question.most) for each in largest]
    micro, split = _split(question.target, useful)
    steps = max(map(len, split))
    return Alternative(
        change=told,
        fits=all(each.with_steps(steps) for each in largest),
        micro_batch_size=micro,
        accumulation_steps=steps,
        peak_process_bytes=estimate.memory(micro, accumulating=steps > 1).peak_process_bytes,
        source=estimate.source,
        predicted_samples_per_second=_rate(measured, micro, question),
    )


def _useful(largest: Largest, measured: Speeds | None, question: Question) -> Largest:
    """No larger than throughput rewards, where it was measured or is known of such a device."""
    useful = useful_tokens(measured, question.recipe.device, MOST_ROWS * question.sequence)
    return largest.capped(max(1, useful // question.sequence))


def _rate(measured: Speeds | None, micro: int, question: Question) -> float | None:
    """Samples of full length per second on all devices, by what was measured on one."""
    tokens = micro * question.sequence
    if measured is None or tokens > _FARTHEST * measured.points[-1][0]:
        return None
    return measured.at(tokens) / question.sequence * len(question.devices)


_BY = {
    "formula": "By formula",
    "simulated": "By a simulation of this step",
    "measured": "By measurements of this step",
}


def _explain(
    fits: bool,
    split: list[list[int]],
    question: Question,
    estimate: Estimate,
    alternatives: list[Alternative],
) -> str:
    source, steps = estimate.source, max(map(len, split))
    tightest, rows, peak, limit = _tightest(split, question, estimate, accumulating=steps > 1)
    where = "" if len({device.memory_bytes for device in question.devices}) == 1 else f" of {tightest.name}"
    if not fits:
        least = next((alternative for alternative in alternatives if alternative.fits), None)
        remedy = (
            f"The least change that fits: {least.change} ({least.peak_process_bytes / GIB:.2f} GiB"
            f"{', by formula' * (least.source == 'formula' != source)})."
            if least
            else "None of the alternatives below fits either: take a larger GPU or a smaller model."
        )
        return (
            f"{_BY[source]} {rows} sample{'s' * (rows > 1)} of {question.sequence} tokens at a time take"
            f"{'s' * (rows == 1)} {peak:.2f} GiB, and {limit:.2f} GiB{where} may be used: it does not fit. "
            f"{remedy}"
        )
    total = sum(map(sum, split))
    return (
        f"{total} samples a step on {len(split)} device{'s' * (len(split) > 1)}: {steps} micro-batch"
        f"{'es' * (steps > 1)} of at most {max(max(own, default=0) for own in split)} on each. {_BY[source]} "
        f"that takes {peak:.2f} of the {limit:.2f} GiB{where} that may be used, at "
        f"{question.sequence} tokens each."
    )


def _tightest(
    split: list[list[int]], question: Question, estimate: Estimate, *, accumulating: bool
) -> tuple[Device, int, float, float]:
    """The device that is used to the largest share: with its largest micro-batch, what that takes, and what
    may be used of it, in GiB."""
    found = []
    for device, own in zip(question.devices, split, strict=True):
        rows = max(own, default=1)
        peak = estimate.memory(rows, accumulating=accumulating).peak_process_bytes / GIB
        found.append((device, rows, peak, question.limits.budget(device.memory_bytes) / GIB))
    return max(found, key=lambda each: each[2] / max(each[3], 1e-9))
