"""The plan of a job: how its spec runs on the devices at hand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from app.contract.accumulation import Precision
from app.contract.memory_profile import Recipe
from app.contract.spec import (
    Cut,
    FixedCount,
    FixedSize,
    Plan,
    PlannedDevice,
    Remedy,
    RunPrecision,
    Spec,
    TokenBudget,
)
from app.planning.devices import Device
from app.planning.estimate import Estimate, Estimates, compared, largest_micro_batch
from app.planning.remedies import changes
from app.planning.speeds import Speeds, SpeedsOf, unmeasured, useful_tokens
from app.planning.split import even, split_over

_BUDGET_STEP = 64
"""Token budgets are multiples of it: the largest micro-batch that a sweep measured is a little smaller than
the budget that it was cut by."""

_WITHOUT_BF16 = re.compile(
    r"\b(P4|P6|P40|P100|P?V100|T4G?|T[456]00|T1000|T1200|M\d\d|K\d\d)\b"
    r"|\b(GTX|TITAN|GEFORCE MX)\b|\bRTX ?20[5-8]0\b|\bQUADRO\b|\b[PK]\d{3,4}\b"
    r"|\bRTX [345678]000\b(?!.*\bADA\b)"
)
"""Names of GPUs older than Ampere (compute capability 8.0), which have no bf16: Pascal, Volta and Turing of
CUDA's list of GPUs by compute capability. For those seen on a machine their capability says it."""


_FIRST_WITH_BF16 = 8.0


@dataclass(frozen=True)
class Capacity:
    """What one device takes of a job, in rows of full length."""

    device: Device
    limit_bytes: int
    most: int
    """The largest micro-batch predicted to fit; at least 1."""
    tokens: int
    """The token budget worth using: beyond it throughput no longer grows."""
    largest: int
    """The same in rows; at least 1."""
    fits: bool
    """Whether even one row is predicted to fit."""
    once: int
    """As `largest`, where the micro-batch is the whole window: no gradients of an earlier one are there."""


def make_plan(
    spec: Spec,
    devices: Sequence[Device],
    estimates: Estimates,
    *,
    predicted: bool,
    threads: int | None = None,
    speeds: SpeedsOf = unmeasured,
    samples_per_second: float | None = None,
) -> Plan:
    """Plans a spec for devices of one kind.

    Args:
        devices: at least one; all CPUs or all GPUs.
        estimates: of the memory that a step takes.
        predicted: false where the plan is a worker's own, for the device that it has.
        speeds: what throughput was measured on such devices.
        samples_per_second: measured before with this model on such a device, for the duration.
    """
    recipe = recipe_of(spec, devices[0])
    estimate = estimates(recipe, spec.data.max_length)
    measured = speeds(recipe, spec.data.max_length) if _planned_freely(spec) else None
    capacities = [_capacity(spec, estimate, device, measured) for device in devices]
    cut, sizes, adjusted = _cut(spec, capacities)
    known = spec.max_steps is not None or spec.data.overlength != "split"
    steps_total = spec.steps_for(spec.data.examples - spec.data.held_out()) if known else None
    return Plan(
        predicted=predicted,
        effective_batch_size=spec.effective_batch_size,
        accumulation_steps=max(len(own) for own in sizes),
        actual_batch_size_per_gpu=max(max(own, default=1) for own in sizes),
        micro_batches=sum(len(own) for own in sizes),
        devices=tuple(
            _planned(estimate, capacity, own, cut) for capacity, own in zip(capacities, sizes, strict=True)
        ),
        steps_total=steps_total,
        predicted_duration_seconds=_duration(spec, steps_total, samples_per_second),
        source=estimate.source,
        warnings=(*adjusted, *_warnings(spec, capacities, steps_total)),
        precision=recipe.precision,
        device=devices[0].kind,
        threads=threads,
        cut=cut,
        most_tokens=min(capacity.most for capacity in capacities) * spec.data.max_length
        if _planned_freely(spec)
        else None,
        remedies=_remedies(spec, recipe, estimates),
    )


def precision_for(asked: Literal["auto"] | Precision, device: Device) -> RunPrecision:
    """bf16 on a GPU that has it, fp16 on one that hasn't, fp32 on a CPU; what was named goes first."""
    if asked != "auto":
        return "fp32" if asked == "no" else asked
    if device.kind == "cpu":
        return "fp32"
    if device.compute_capability is not None:
        return "bf16" if device.compute_capability >= _FIRST_WITH_BF16 else "fp16"
    name = re.sub(r"[-_]", " ", device.name.upper())
    return "fp16" if _WITHOUT_BF16.search(name) else "bf16"


def recipe_of(spec: Spec, device: Device) -> Recipe:
    """How a spec's step is made on a device."""
    return Recipe(
        precision=precision_for(spec.precision, device),
        optimizer=spec.optimizer.name,
        gradient_checkpointing=spec.gradient_checkpointing,
        attention=spec.attention,
        device=device.kind,
        momentum=spec.optimizer.name == "sgd" and bool(spec.optimizer.momentum),
        freeze=spec.freeze,
        packing=spec.data.packing,
        label_smoothing=spec.label_smoothing > 0,
        aux_scope=spec.aux_scope,
        clips=spec.gradient_clipping is not None,
        lora=spec.method.lora,
        quantised=spec.method.name == "qlora",
        accumulate_in_fp32=spec.accumulate_in_fp32,
        accumulate_on_cpu=spec.accumulate_gradients_on_cpu,
        optimizer_on_cpu=spec.use_cpu_offload and device.kind == "cuda",
        expandable_segments=device.expandable_segments,
    )


def _remedies(spec: Spec, recipe: Recipe, estimates: Estimates) -> tuple[Remedy, ...]:
    """What would take less memory than the spec as it stands, each alone, for one sample of full length."""
    length = spec.data.max_length
    estimates = compared(estimates, spec.model.architecture, recipe, length)
    peak = estimates(recipe, length).memory(1).peak_process_bytes
    found = [
        (change.told, estimates(change.recipe, change.sequence).memory(1).peak_process_bytes)
        for change in changes(recipe, length)
    ]
    return tuple(
        Remedy(change=told, predicted_peak_bytes=bytes_)
        for told, bytes_ in sorted(found, key=lambda pair: pair[1])
        if bytes_ < peak
    )


def _capacity(spec: Spec, estimate: Estimate, device: Device, measured: Speeds | None) -> Capacity:
    limit, length = spec.memory.budget(device.memory_bytes), spec.data.max_length
    fitting = largest_micro_batch(estimate, limit)
    most = max(1, fitting)
    tokens = most * length
    if _planned_freely(spec):
        useful = useful_tokens(measured, device.kind, tokens)
        tokens = min(tokens, ceil(useful / _BUDGET_STEP) * _BUDGET_STEP)
    once = max(1, largest_micro_batch(estimate, limit, accumulating=False))
    if _planned_freely(spec):
        once = max(1, min(once, useful_tokens(measured, device.kind, once * length) // length))
    return Capacity(device, limit, most, tokens, max(1, tokens // length), fitting > 0, once)


def _planned_freely(spec: Spec) -> bool:
    return spec.split.accumulation_steps is None and spec.split.micro_batch_size is None


def _cut(spec: Spec, capacities: Sequence[Capacity]) -> tuple[Cut, list[list[int]], list[str]]:
    """How windows are cut, the micro-batches that this gives at full length, and what had to be changed."""
    split, batch, devices = spec.split, spec.effective_batch_size, len(capacities)
    largest = [capacity.largest for capacity in capacities]
    if _planned_freely(spec):
        budget = min(capacity.tokens for capacity in capacities)
        constant = spec.ramp.name == "constant" and devices == 1
        if constant and largest[0] < batch <= capacities[0].once:
            return FixedCount(micro_batches=1), [[batch]], []
        return TokenBudget(tokens=budget), split_over(batch, largest), []
    count = min(batch, (split.accumulation_steps or 1) * split.devices)
    asked = split.micro_batch_size or ceil(batch / count)
    if spec.auto_adjust_batch_size and min(largest) < asked:
        rows = min(largest)
        changed = f"micro-batches of {asked} are predicted not to fit: at most {rows}, and the batch stays"
        return FixedSize(samples=rows), split_over(batch, [rows] * devices), [changed]
    if split.micro_batch_size is not None:
        return FixedSize(samples=asked), split_over(batch, [asked] * devices), []
    each = even(batch, count)
    return FixedCount(micro_batches=count), [each[start::devices] for start in range(devices)], []


def _planned(estimate: Estimate, capacity: Capacity, sizes: list[int], cut: Cut) -> PlannedDevice:
    rows = max(sizes, default=1)
    memory = estimate.memory(rows, accumulating=len(sizes) > 1)
    return PlannedDevice(
        gpu_id=capacity.device.id,
        name=capacity.device.name,
        micro_batch_size=rows,
        accumulation_steps=len(sizes),
        token_budget=cut.tokens if isinstance(cut, TokenBudget) else None,
        predicted_peak_bytes=memory.peak_process_bytes,
        memory_limit_bytes=capacity.limit_bytes,
    )


def samples_of(spec: Spec, steps_total: int | None) -> int | None:
    """Samples that a whole run goes through; null where only the tokenizer can tell."""
    if steps_total is None:
        return None
    if spec.epochs is not None:
        return (spec.data.examples - spec.data.held_out()) * spec.epochs
    return steps_total * spec.effective_batch_size


def unsupported(device: Literal["cpu", "cuda"], *, quantised: bool, optimizer: str) -> list[str]:
    """What a device cannot do of what is asked."""
    wanted = [name for name, is_wanted in (("qlora", quantised), ("adamw_8bit", optimizer == "adamw_8bit"))
              if is_wanted and device == "cpu"]  # fmt: skip
    return [f"{name} needs an NVIDIA GPU, and no worker here has one: the job would fail" for name in wanted]


def _duration(spec: Spec, steps: int | None, samples_per_second: float | None) -> float | None:
    samples = samples_of(spec, steps)
    return samples / samples_per_second if samples is not None and samples_per_second else None


def _warnings(spec: Spec, capacities: Sequence[Capacity], steps_total: int | None) -> list[str]:
    warnings = []
    tight = [str(capacity.device.id) for capacity in capacities if not capacity.fits]
    if tight:
        warnings.append(
            f"not even one sample of {spec.data.max_length} tokens fits device "
            f"{', '.join(tight)}: lower max_length, switch gradient_checkpointing on, or take more memory"
        )
    if spec.data.overlength != "split" and spec.data.examples < spec.effective_batch_size:
        warnings.append(
            f"the samples are {spec.data.examples}, fewer than the effective batch of "
            f"{spec.effective_batch_size}: one step an epoch, over all of them"
        )
    warmup = spec.schedule.warmup_steps
    if warmup is not None and steps_total is not None and warmup >= steps_total:
        warnings.append(
            f"warmup_steps {warmup} is not shorter than the {steps_total} steps: the learning rate never "
            "reaches its peak"
        )
    if spec.clip_mode == "each_micro_batch":
        warnings.append(
            "clip_mode each_micro_batch clips the running sum after every micro-batch: the result depends "
            "on the split"
        )
    if spec.ramp.name in ("noise_scale", "loss_variance"):
        warnings.append(
            f"accumulation_scheduler {spec.ramp.name} follows what is measured: the steps of a run by epochs "
            "are an upper bound, and another plan may ramp otherwise"
        )
    if spec.use_cpu_offload and capacities[0].device.kind == "cpu":
        warnings.append("use_cpu_offload changes nothing on a CPU, whose memory holds everything already")
    warnings += unsupported(
        capacities[0].device.kind, quantised=spec.method.name == "qlora", optimizer=spec.optimizer.name
    )
    if spec.split.devices > len(capacities):
        warnings.append(
            f"the trainer uses one device: the effective batch reckoned for {spec.split.devices} is kept by "
            "accumulating more"
        )
    return warnings
