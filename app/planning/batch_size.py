"""The calculator: the largest micro-batch that fits each device, and the split of a target."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor

from app.planning.devices import GIB, Device
from app.planning.memory import Memory, Method, largest_micro_batch, step_memory
from app.planning.split import split_over
from app.schemas.architecture import Architecture
from app.schemas.calculators import (
    Alternative,
    BatchSizeAnswer,
    DeviceSplit,
    MemoryAnswer,
)
from app.schemas.spec import MemoryLimits

DEFAULT_TARGET = 32


@dataclass(frozen=True)
class Question:
    """A model, a way of training it, and the devices."""

    model_name: str
    architecture: Architecture
    method: Method
    sequence: int
    limits: MemoryLimits
    devices: Sequence[Device]
    target: int | None


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


def answer(question: Question, warnings: list[str]) -> BatchSizeAnswer:
    """The split by formula."""
    largest = [_largest(question, device) for device in question.devices]
    fits = all(largest)
    micro, split = _split(question.target, largest)
    memory = step_memory(question.architecture, question.method, micro, question.sequence)
    return BatchSizeAnswer(
        model_name=question.model_name,
        parameters=question.architecture.parameters,
        fits=fits,
        actual_batch_size_per_gpu=micro,
        accumulation_steps=max(map(len, split)),
        effective_batch_size=sum(map(sum, split)),
        max_micro_batch_size=max(largest),
        devices=_devices(question.devices, question.limits, largest, split),
        memory=_memory(memory),
        source="formula",
        expected_error=None,
        alternatives=_alternatives(question),
        explanation=_explain(fits, split, question, memory),
        warnings=warnings,
    )


def answer_raw(question: RawQuestion) -> BatchSizeAnswer:
    """The same from raw figures: weights, their gradients and states, and so much for each sample."""
    fixed = int(question.weights_bytes * (2 + question.optimizer_states))
    budget = question.limits.budget(question.available_bytes)
    room = floor(max(0, budget - fixed) / question.activation_bytes_per_sample)
    devices = [
        Device(number, "as given", question.available_bytes, "cuda") for number in range(question.devices)
    ]
    micro, split = _split(question.target, [room] * len(devices))
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


def _largest(question: Question, device: Device) -> int:
    return largest_micro_batch(
        question.architecture, question.method, question.sequence, question.limits.budget(device.memory_bytes)
    )


def _split(target: int | None, largest: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The largest micro-batch used, and each device's micro-batches; as if one sample fitted everywhere."""
    capacities = [max(1, rows) for rows in largest]
    split = split_over(target or min(DEFAULT_TARGET, sum(capacities)), capacities)
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
        **asdict(memory),
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        peak_process_bytes=memory.peak_process_bytes,
    )


_CHANGES: dict[str, Callable[[Question], Question]] = {
    "gradient_checkpointing": lambda q: replace(q, method=replace(q.method, gradient_checkpointing=True)),
    "mixed_precision bf16": lambda q: replace(q, method=replace(q.method, precision="bf16")),
    "optimizer sgd": lambda q: replace(q, method=replace(q.method, optimizer="sgd")),
    "half the max_length": lambda q: replace(q, sequence=max(2, q.sequence // 2)),
    "twice the devices": lambda q: replace(q, devices=[*q.devices, *q.devices]),
}


def _alternatives(question: Question) -> list[Alternative]:
    """What other choices would give, where they are not made already and one sample fits."""
    alternatives = []
    for change, apply in _CHANGES.items():
        changed = apply(question)
        largest = [_largest(changed, device) for device in changed.devices]
        if changed == question or not all(largest):
            continue
        micro, split = _split(changed.target, largest)
        peak = step_memory(changed.architecture, changed.method, micro, changed.sequence).peak_process_bytes
        alternatives.append(
            Alternative(
                change=change,
                micro_batch_size=micro,
                accumulation_steps=max(map(len, split)),
                peak_process_bytes=peak,
            )
        )
    return alternatives


def _explain(fits: bool, split: list[list[int]], question: Question, memory: Memory) -> str:
    peak = memory.peak_process_bytes / GIB
    limit = min(question.limits.budget(device.memory_bytes) for device in question.devices) / GIB
    if not fits:
        return (
            f"By formula one sample of {question.sequence} tokens takes {peak:.2f} GiB, and {limit:.2f} GiB "
            "may be used: it does not fit. The alternatives are those changes that would make it fit."
        )
    steps, total = max(map(len, split)), sum(map(sum, split))
    return (
        f"{total} samples a step on {len(split)} device{'s' * (len(split) > 1)}: {steps} micro-batch"
        f"{'es' * (steps > 1)} of at most {max(max(own, default=0) for own in split)} on each, {peak:.2f} of "
        f"the {limit:.2f} GiB that may be used, at {question.sequence} tokens a sample."
    )
