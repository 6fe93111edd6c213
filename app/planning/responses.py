"""The calculator's answer: a solution with its alternatives, in numbers and in a sentence."""

from dataclasses import dataclass
from math import floor

from app.contract.accumulation import MAX_ACCUMULATION_STEPS
from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.plan import Alternative, Source
from app.contract.spec import MemoryLimits, Strategy
from app.planning.changes import changes
from app.planning.devices import GIB, Device
from app.planning.estimate import Estimate
from app.planning.memory import Memory
from app.planning.planner import (
    PlannerEvidence,
    Question,
    Rank,
    Solution,
    alternatives,
    recipe_of_rank,
    solve,
)
from app.planning.schemas import BatchSizeResponse, DeviceSplit
from app.planning.sharding import sharded_across

_BY = {
    "formula": "By formula,",
    "simulated": "By a simulation of this step,",
    "measured": "By measurements of this step,",
}


def answer(
    question: Question, known: PlannerEvidence, model_name: str, warnings: list[str]
) -> BatchSizeResponse:
    """The planner's split, its predicted memory, and the alternatives to it."""
    solution = solve(question, known)
    others = alternatives(solution, known)
    return _answer(
        solution,
        others,
        _explain(solution, others),
        warnings,
        model_name=model_name,
        architecture=known.architecture,
    )


def step_to_simulate(answered: BatchSizeResponse, question: Question) -> tuple[Recipe, int] | None:
    """The recipe and the sample length of a device's step with the smallest change that makes it fit, if it
    does not fit without and that change was only estimated by formula; otherwise None."""
    if answered.fits:
        return None
    least = next((other for other in answered.alternatives if other.fits), None)
    if least is None or least.source != "formula":
        return None
    others = changes(question.recipe, question.sequence)
    change = next((change for change in others if change.description == least.change), None)
    if change is None:
        return None
    strategy: Strategy = "ddp" if least.zero_stage is None else "fsdp"
    ranks = len(question.devices)
    recipe = change.recipe
    if ranks > 1:
        recipe = recipe_of_rank(recipe, ranks, strategy, least.zero_stage or 3)
    return recipe, change.sequence


@dataclass(frozen=True)
class ByFigures:
    """Memory from raw figures instead of a model: fixed bytes, plus `sample_bytes` per sample."""

    weights_bytes: int
    optimizer_bytes: int
    sample_bytes: int
    source: Source = "formula"
    expected_error: float | None = None

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        return Memory(
            weights_bytes=self.weights_bytes,
            gradients_bytes=self.weights_bytes,
            optimizer_bytes=self.optimizer_bytes,
            activations_bytes=floor(self.sample_bytes * rows),
            logits_bytes=0,
            workspace_bytes=0,
            context_bytes=0,
            reserved_over_allocated=1.0,
        )


@dataclass(frozen=True)
class RawQuestion:
    """Raw figures instead of a model; bytes."""

    weights_bytes: int
    sample_bytes: int
    """Activations of one sample."""
    available_bytes: int
    limits: MemoryLimits
    optimizer_states: float
    """Optimizer states per weight, in multiples of the weight's bytes."""
    devices: int
    target: int | None


_NO_RECIPE = Recipe(device="cuda", precision="fp32")


def answer_raw(raw: RawQuestion) -> BatchSizeResponse:
    """The answer for raw figures: weights, their gradients and states, and memory per sample."""
    estimate: Estimate = ByFigures(
        raw.weights_bytes, int(raw.weights_bytes * raw.optimizer_states), raw.sample_bytes
    )
    devices = [Device(number, "as given", raw.available_bytes, "cuda") for number in range(raw.devices)]
    question = Question(_NO_RECIPE, 1, devices, raw.limits, raw.target)
    solution = solve(question, PlannerEvidence(lambda recipe, sequence: estimate))
    rank = solution.ranks[0]
    fixed, budget = estimate.memory(0).peak_process_bytes / GIB, rank.capacity.limit_bytes / GIB
    explanation = (
        f"Weights, gradients and optimizer states take {fixed:.2f} of the {budget:.2f} GiB that may be used; "
        f"{rank.capacity.largest} samples fit in the rest."
    )
    warnings = [] if rank.capacity.largest else ["not even one sample fits: the figures below are for one"]
    return _answer(solution, [], explanation, warnings)


def _answer(
    solution: Solution,
    others: list[Alternative],
    explanation: str,
    warnings: list[str],
    *,
    model_name: str | None = None,
    architecture: Architecture | None = None,
) -> BatchSizeResponse:
    return BatchSizeResponse(
        model_name=model_name,
        parameters=None if architecture is None else architecture.parameters,
        parameters_are_estimated=architecture is not None and architecture.is_estimated,
        fits=solution.fits,
        actual_batch_size_per_gpu=solution.micro_batch,
        accumulation_steps=solution.steps,
        effective_batch_size=solution.effective_batch,
        max_micro_batch_size=max(rank.capacity.largest_in(solution.steps) for rank in solution.ranks),
        devices=[_device(rank, solution.steps) for rank in solution.ranks],
        strategy="fsdp" if solution.is_sharded else "ddp",
        zero_stage=solution.question.zero_stage if solution.is_sharded else None,
        memory=solution.tightest.memory,
        source=solution.estimate.source,
        expected_error=solution.estimate.expected_error,
        predicted_samples_per_second=solution.samples_per_second,
        alternatives=others,
        explanation=explanation,
        warnings=warnings,
    )


def _device(rank: Rank, steps: int) -> DeviceSplit:
    return DeviceSplit(
        gpu_id=rank.device.id,
        name=rank.device.name,
        memory_bytes=rank.device.memory_bytes,
        memory_limit_bytes=rank.capacity.limit_bytes,
        max_micro_batch_size=rank.capacity.largest_in(steps),
        micro_batch_size=rank.micro_batches.largest,
        accumulation_steps=len(rank.micro_batches),
        micro_batch_sizes=rank.micro_batches.sizes(MAX_ACCUMULATION_STEPS),
        samples=rank.micro_batches.samples,
    )


def _unit(question: Question, count: int) -> str:
    """What a sample is called: a pair has two sequences."""
    return ("sample" if question.sequences_per_sample == 1 else "pair") + "s" * (count != 1)


def _counted(question: Question, count: int | None = None) -> str:
    """Samples of full length: a number of them, or any."""
    unit = _unit(question, count or 0)
    number = "" if count is None else f"{count} "
    several = "" if question.sequences_per_sample == 1 else f"{question.sequences_per_sample} × "
    return f"{number}{unit} of {several}{question.sequence} tokens"


def _explain(solution: Solution, others: list[Alternative]) -> str:
    question, source, tightest = solution.question, solution.estimate.source, solution.tightest
    peak, limit = tightest.memory.peak_process_bytes / GIB, tightest.capacity.limit_bytes / GIB
    rows, devices, batch = tightest.micro_batch, len(solution.ranks), solution.effective_batch
    alike = len({device.memory_bytes for device in question.devices}) == 1
    where = "" if alike else f" of {tightest.device.name}"
    if not solution.fits:
        least = next((other for other in others if other.fits), None)
        remedy = (
            f"The smallest change that fits: {least.change} ({least.peak_process_bytes / GIB:.2f} GiB"
            f"{', by formula' * (least.source == 'formula' != source)})."
            if least
            else "None of the alternatives below fits either: use a larger GPU or a smaller model."
        )
        return (
            f"{_BY[source]} {_counted(question, rows)} at a time take"
            f"{'s' * (rows == 1)} {peak:.2f} GiB, but only {limit:.2f} GiB{where} may be used: it does "
            f"not fit{_although_sharded(solution)}. "
            f"{remedy}"
        )
    return (
        f"{batch} {_unit(question, batch)} per step on {devices} device{'s' * (devices > 1)}: "
        f"{solution.steps} micro-batch{'es' * (solution.steps > 1)} of at most {solution.micro_batch} "
        f"{_unit(question, solution.micro_batch)} on each. {_BY[source]} with "
        f"{_counted(question)}, that takes {peak:.2f} of the {limit:.2f} GiB{where} that may be used."
        + _sharding(solution)
    )


def _although_sharded(solution: Solution) -> str:
    if not solution.is_sharded:
        return ""
    return f", even if {sharded_across(f'the {len(solution.ranks)} devices', solution.question.zero_stage)}"


def _sharding(solution: Solution) -> str:
    """How devices divide the model; nothing if each has a full copy."""
    if not solution.is_sharded:
        return ""
    parts = sharded_across("them", solution.question.zero_stage)
    return f" A full copy of the model does not fit on each device, so {parts}."
