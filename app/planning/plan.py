"""The plan of a job: its spec, solved for the available devices."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

from app.contract.plan import Alternative, Plan, RankPlan
from app.contract.preview import Lengths
from app.contract.spec import Spec
from app.planning.devices import Device
from app.planning.planner import PlannerEvidence, Question, Solution, alternatives, solve
from app.planning.recipes import least_capable, recipe_of, unsupported_on
from app.planning.sharding import may_shard, sharded_across

_ROUNDED_TO = 64
"""Lengths are rounded up to multiples of this, so that data of similar lengths share a memory profile."""
_NOT_ALL_MEASURED = 1.1
"""The margin on the longest sample if only a part of the data was measured."""


def sample_length_of(spec: Spec, lengths: Lengths | None) -> int:
    """Tokens of a sequence of full length: of the longest in the data if it was measured, at most
    `max_length`."""
    if lengths is None:
        return spec.data.max_length
    margin = 1.0 if lengths.examples >= spec.data.examples else _NOT_ALL_MEASURED
    rounded = ceil(lengths.longest * margin / _ROUNDED_TO) * _ROUNDED_TO
    return min(spec.data.max_length, max(_ROUNDED_TO, rounded))


def question_of(spec: Spec, devices: Sequence[Device], sample_length: int) -> Question:
    """A spec as the planner's question."""
    return Question(
        recipe=recipe_of(spec, least_capable(devices)),
        sequence=sample_length,
        devices=devices,
        limits=spec.memory,
        effective_batch=spec.effective_batch_size,
        split=spec.split,
        constant_batch=spec.ramp.name == "constant",
        tunes=spec.tune in ("first", "only"),
        shrink_to_fit=spec.auto_adjust_batch_size,
        strategy="fsdp" if spec.strategy == "fsdp" and len(devices) > 1 else "ddp",
        zero_stage=spec.zero_stage or 3,
        may_shard=may_shard(spec),
        compresses=spec.gradient_compression is not None,
        sequences_per_sample=spec.data.sequences_per_sample,
    )


def make_plan(
    spec: Spec,
    devices: Sequence[Device],
    known: PlannerEvidence,
    *,
    predicted: bool,
    sample_length: int | None = None,
    threads: int | None = None,
) -> Plan:
    """Plans a spec.

    Args:
        sample_length: tokens of a sequence of full length (`sample_length_of`); None: `max_length`.
        devices: at least one; all CPUs or all GPUs.
        known: what is known of the spec's architecture on such devices.
        predicted: false for a worker's own plan, for the device that it has.
    """
    most, sample_length = spec.data.max_length, sample_length or spec.data.max_length
    if sample_length < most:  # a tuning run from before the samples were measured is of use, too
        swept = known.throughput
        known = replace(known, throughput=lambda recipe, length: swept(recipe, length) or swept(recipe, most))
    solution = _solved(spec, devices, known, sample_length)
    question = solution.question
    known_count = spec.max_steps is not None or spec.data.overlength != "split"
    steps_total = spec.steps_for(samples_of_one_pass(spec)) if known_count else None
    planned = question.is_planned
    others = alternatives(solution, known)
    fitting = min(max(1, rank.capacity.largest) for rank in solution.ranks)
    return Plan(
        predicted=predicted,
        effective_batch_size=spec.effective_batch_size,
        accumulation_steps=solution.steps,
        actual_batch_size_per_gpu=solution.micro_batch,
        micro_batches=sum(len(rank.micro_batches) for rank in solution.ranks),
        ranks=_ranks(solution),
        steps_total=steps_total,
        predicted_duration_seconds=None,
        source=solution.estimate.source,
        warnings=_warnings(spec, solution, steps_total, others),
        precision=question.recipe.precision,
        device=devices[0].kind,
        strategy="independent" if spec.strategy == "independent" else question.strategy,
        zero_stage=question.zero_stage,
        threads=threads,
        sample_length=sample_length,
        most_tokens=fitting * question.sample_tokens if planned else None,
        alternatives=_leaner(solution, others),
    )


def devices_worth_using(
    spec: Spec, devices: Sequence[Device], known: PlannerEvidence, sample_length: int
) -> int:
    """How many devices to use if the number is left to the planner: the fewest on which the job fits; on
    GPUs, up to one for each full micro-batch of a step. Several CPU devices are not faster than one."""

    def with_first(count: int) -> Solution:
        return _solved(spec, devices[:count], known, sample_length)

    enough = next((count for count in range(1, len(devices) + 1) if with_first(count).fits), 1)
    if devices[0].kind == "cpu":
        return enough
    steps = with_first(enough).steps
    return max(enough, min(len(devices), steps * enough))


def _solved(spec: Spec, devices: Sequence[Device], known: PlannerEvidence, sample_length: int) -> Solution:
    """The solution for the requested strategy."""
    question = question_of(spec, devices, sample_length)
    if spec.strategy != "independent":
        return solve(question, known)
    alone = [_solved_alone(question, device, known) for device in devices]
    return replace(alone[0], question=question, ranks=[each.ranks[0] for each in alone])


def _solved_alone(question: Question, device: Device, known: PlannerEvidence) -> Solution:
    """The solution for one of several independent replicas."""
    split = question.split.model_copy(update={"devices": 1})
    return solve(replace(question, devices=[device], split=split), known)


def _ranks(solution: Solution) -> tuple[RankPlan, ...]:
    return tuple(
        RankPlan(
            rank=number,
            gpu_id=rank.device.id,
            name=rank.device.name,
            micro_batch_rule=rank.rule,
            expected_micro_batches=len(rank.micro_batches),
            micro_batch_size=rank.micro_batch,
            predicted_peak_bytes=rank.memory.peak_process_bytes,
            memory_limit_bytes=rank.capacity.limit_bytes,
            share_of_tokens=rank.micro_batches.samples / solution.effective_batch,
        )
        for number, rank in enumerate(solution.ranks)
    )


def _leaner(solution: Solution, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Alternatives that need less memory for one sample, the leanest first."""
    least = solution.estimate.memory(1).peak_process_bytes
    leaner = [other for other in others if other.one_sample_bytes < least]
    return tuple(sorted(leaner, key=lambda other: other.one_sample_bytes))


def samples_of_one_pass(spec: Spec) -> int:
    """The samples of one epoch; with independent replicas, those of the largest shard."""
    samples = spec.data.examples - spec.data.held_out()
    return ceil(samples / spec.split.devices) if spec.strategy == "independent" else samples


def samples_of(spec: Spec, steps_total: int | None) -> int | None:
    """The number of samples in a whole run; None if it depends on the tokenizer."""
    if steps_total is None:
        return None
    if spec.epochs is not None:
        return (spec.data.examples - spec.data.held_out()) * spec.epochs
    replicas = spec.split.devices if spec.strategy == "independent" else 1
    return steps_total * spec.effective_batch_size * replicas


def _warnings(
    spec: Spec, solution: Solution, steps_total: int | None, others: Sequence[Alternative]
) -> tuple[str, ...]:
    warnings = [] if solution.adjusted is None else [solution.adjusted]
    if not solution.fits:
        warnings.append(_does_not_fit(solution, others))
    samples = samples_of_one_pass(spec)
    if spec.data.overlength != "split" and samples < spec.effective_batch_size:
        there = "is only 1 sample" if samples == 1 else f"are only {samples} samples"
        warnings.append(
            f"there {there} to train on, fewer than the effective batch of {spec.effective_batch_size}: each "
            "epoch is one step over all of them"
        )
    if steps_total is not None:
        warnings += _warnings_of_steps(spec, steps_total)
    return (*warnings, *_warnings_of_options(spec, solution))


def _warnings_of_steps(spec: Spec, steps_total: int) -> list[str]:
    """Warnings about what a run is too short for."""
    warnings = []
    given, warmup = spec.schedule.warmup_steps, spec.schedule.warmup(steps_total)
    of_run = "the run's only step" if steps_total == 1 else f"the {steps_total} steps of the run"
    if warmup >= steps_total and spec.schedule.warmup_start < 1:
        ratio = f"warmup_ratio {spec.schedule.warmup_ratio:g}"
        named = ratio if given is None else f"warmup_steps {given}"
        warnings.append(
            f"the warmup ({named}) is not shorter than {of_run}: the learning rate never reaches its peak"
        )
    if spec.early_stopping is not None and spec.eval_every is not None and spec.eval_every > steps_total:
        warnings.append(
            f"early_stopping has no effect, since eval_every {spec.eval_every} is more than {of_run}"
        )
    return warnings


def _does_not_fit(solution: Solution, others: Sequence[Alternative]) -> str:
    """What does not fit where, and the smallest change that helps."""
    tight = [rank for rank in solution.ranks if not rank.fits]
    where = f"on device {', '.join(str(rank.device.id) for rank in tight)}"
    least = min(rank.capacity.largest_in(len(rank.micro_batches)) for rank in tight)
    tokens = solution.question.sample_tokens
    if least:
        what = f"{solution.micro_batch} samples of {tokens} tokens at a time do not fit {where}, {least} do"
    else:
        what = f"not even one sample of {tokens} tokens fits {where}"
    change = next((other.change for other in others if other.fits), None)
    remedy = "use a device with more memory, or a smaller model" if change is None else f"set {change}"
    return f"{what}: {remedy}"


def _warnings_of_options(spec: Spec, solution: Solution) -> list[str]:
    """Warnings about options that have side effects, or no effect, under this plan."""
    kind: Literal["cpu", "cuda"] = solution.ranks[0].device.kind
    warnings = []
    if spec.clip_mode == "each_micro_batch":
        warnings.append(
            "clip_mode each_micro_batch clips the running sum after every micro-batch: the result depends "
            "on the split"
        )
    if spec.ramp.name in ("noise_scale", "loss_variance"):
        warnings.append(
            f"accumulation_scheduler {spec.ramp.name} depends on measurements: the batch may grow "
            "differently under another plan. If the job's length is given in epochs, the planned number of "
            "steps is an upper bound"
        )
    if solution.question.strategy == "fsdp" and spec.strategy is None:
        parts = sharded_across(f"{len(solution.ranks)} devices", solution.question.zero_stage)
        warnings.append(f"a full copy does not fit on each device, so {parts}")
    if spec.gradient_compression is not None and len(solution.ranks) > 1:
        warnings.append(
            f"gradient_compression: gradients are rounded to {spec.gradient_compression} when they are sent, "
            "so training only approximates that of one device"
        )
    if spec.freeze and solution.estimate.source == "formula":
        warnings.append(
            "the formula counts all parameters as trained, also those that freeze names, so its prediction "
            "is too high: the simulation is exact about them"
        )
    if spec.use_cpu_offload and kind == "cpu":
        warnings.append("use_cpu_offload changes nothing on a CPU, whose memory holds everything already")
    warnings += unsupported_on(kind, spec).values()
    unused = {"report_to": spec.report_to, "profile": spec.profile}
    without = [name for name, value in unused.items() if value] if spec.strategy == "independent" else []
    if without:
        warnings.append(f"independent replicas ignore {' and '.join(without)}")
    if spec.average and spec.method.lora is not None:
        warnings.append(
            "average: adapters are averaged matrix by matrix, which is not the average of the models that "
            "they make"
        )
    if spec.strategy == "independent" and spec.split.devices > len(solution.ranks):
        warnings.append(
            f"{spec.split.devices} independent replicas take turns on {len(solution.ranks)} devices"
        )
    elif spec.split.devices > len(solution.ranks):
        warnings.append(
            f"{spec.split.devices} devices were requested, and the plan is for {len(solution.ranks)}: more "
            "micro-batches are accumulated, so that the effective batch is unchanged"
        )
    return warnings
