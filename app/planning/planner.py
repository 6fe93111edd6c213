"""The planner: how an effective batch is split over devices, and how much of their memory that takes.

`solve` is the only place where a plan's micro-batch size is chosen. The calculator, a dry run, a worker's
plan for its own device and the alternatives in an answer all call it, so they cannot disagree. These are pure
functions: what was measured or simulated comes in as `PlannerEvidence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, inf

from app.contract.accumulation import MAX_ACCUMULATION_STEPS, MAX_MICRO_BATCH
from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.plan import Alternative, FixedCount, FixedSize, MicroBatchRule, TokenBudget
from app.contract.spec import MemoryLimits, RequestedSplit, Strategy, ZeroStage
from app.planning.changes import changes
from app.planning.devices import Device
from app.planning.estimate import (
    Estimate,
    EstimateOf,
    OfSamples,
    WithGradientBuffers,
    comparable_estimates,
    largest_micro_batch,
)
from app.planning.estimate import by_formula as estimates_by_formula
from app.planning.memory import Memory
from app.planning.sharding import ZERO_STAGES, is_shardable
from app.planning.split import NO_MICRO_BATCH, MicroBatches, even, shares, split_over
from app.planning.throughput import Throughput, ThroughputOf, unmeasured, unpadded_tokens, useful_tokens

MAX_DEFAULT_BATCH = 32
"""The largest effective batch, in samples, if a question gives none."""

_BUDGET_STEP = 64
"""Token budgets are rounded up to multiples of this: a tuning run reports the tokens of its largest
micro-batch, which are slightly fewer than the budget that limited it."""

_MAX_EXTRAPOLATION = 2
"""No rate is predicted for micro-batches more than this many times as large as the largest measured one."""

PLANNED = RequestedSplit(accumulation_steps=None, micro_batch_size=None, devices=1)
"""Nothing is fixed: the planner chooses the micro-batch."""


@dataclass(frozen=True)
class PlannerEvidence:
    """What is known of one architecture's steps on devices of one kind."""

    estimates: EstimateOf
    throughput: ThroughputOf = unmeasured
    architecture: Architecture | None = None
    """None: the question is of raw figures, not of a model."""


def by_formula(architecture: Architecture) -> PlannerEvidence:
    """What is known from the architecture alone: estimates by formula."""
    return PlannerEvidence(estimates_by_formula(architecture), architecture=architecture)


@dataclass(frozen=True)
class Question:
    """The planner's input: the recipe of a step, the devices, and the effective batch."""

    recipe: Recipe
    sequence: int
    """Tokens of a sequence of full length."""
    devices: Sequence[Device]
    """At least one; all CPUs or all GPUs."""
    limits: MemoryLimits
    effective_batch: int | None
    """Samples of one optimizer step over all devices; None: as many as fit at once, at most 32."""
    split: RequestedSplit = PLANNED
    constant_batch: bool = True
    """Whether every window has that many samples; false: the effective batch grows during training."""
    tunes: bool = False
    """Whether a tuning run will choose the micro-batch, up to a token budget."""
    shrink_to_fit: bool = False
    """Replace a requested micro-batch that is predicted not to fit by the largest that does."""
    at_most: int | None = None
    """The largest micro-batch to consider, in samples; None: any that fits."""
    strategy: Strategy = "ddp"
    """How several devices share the work."""
    zero_stage: ZeroStage = 3
    """What devices divide, if the strategy is fsdp."""
    may_shard: bool = False
    """Whether several devices may divide the model, if full copies do not fit (fsdp instead of ddp)."""
    compresses: bool = False
    """Whether ranks send gradients in 16 bits."""
    sequences_per_sample: int = 1
    """The sequences that a sample has in a micro-batch: two if it is a pair."""

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample of full length."""
        return self.sequence * self.sequences_per_sample

    @property
    def is_planned(self) -> bool:
        """Whether the micro-batch is left to the planner."""
        return self.split.accumulation_steps is None and self.split.micro_batch_size is None


@dataclass(frozen=True)
class Capacity:
    """The micro-batches that one device takes, in samples of full length."""

    device: Device
    limit_bytes: int
    """The part of the device's memory that may be used."""
    largest: int
    """The most predicted to fit, while gradients of earlier micro-batches are held; 0: not even one fits."""
    largest_alone: int
    """The largest micro-batch that fits if its window has no other."""
    useful: int
    """The largest micro-batch that still raises throughput, at most `largest`, at least 1."""
    useful_alone: int
    """The useful micro-batch if its window has no other."""
    useful_tokens: int
    """The useful micro-batch in padded tokens."""
    unpadded_tokens: int | None = None
    """The useful micro-batch in tokens if samples are not padded; None: the same."""

    def largest_in(self, steps: int) -> int:
        """The largest micro-batch that fits if a window has this many micro-batches."""
        return self.largest_alone if steps == 1 else self.largest


@dataclass(frozen=True)
class Rank:
    """One device's part of every step."""

    capacity: Capacity
    rule: MicroBatchRule
    micro_batches: MicroBatches
    """Its micro-batches, if all samples have full length; empty: other ranks process the whole batch."""
    memory: Memory
    """Memory at the peak of a step, with the largest micro-batch."""

    @property
    def device(self) -> Device:
        return self.capacity.device

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch."""
        return self.micro_batches.largest or 1

    @property
    def fits(self) -> bool:
        return self.capacity.largest_in(len(self.micro_batches)) >= self.micro_batch


@dataclass(frozen=True)
class Solution:
    """The answer to a question: the split, and the memory that it needs."""

    question: Question
    ranks: list[Rank]
    estimate: Estimate
    throughput: Throughput | None
    adjusted: str | None = None
    """How the requested split was changed, and why; None if it was not."""

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks)

    @property
    def is_sharded(self) -> bool:
        """Whether the devices divide the model."""
        return self.question.strategy == "fsdp" and len(self.ranks) > 1

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch on any device."""
        return max(rank.micro_batch for rank in self.ranks)

    @property
    def steps(self) -> int:
        """Accumulation steps: the most micro-batches on one device."""
        return max(len(rank.micro_batches) for rank in self.ranks)

    @property
    def effective_batch(self) -> int:
        return sum(rank.micro_batches.samples for rank in self.ranks)

    @property
    def tightest(self) -> Rank:
        """The device that uses the largest share of its memory."""
        return max(
            self.ranks, key=lambda rank: rank.memory.peak_process_bytes / max(rank.capacity.limit_bytes, 1)
        )

    @property
    def samples_per_second(self) -> float | None:
        """Full-length samples per second, forward and backward, on all devices, measured on one of them;
        None if no similar size was measured."""
        tokens = self.micro_batch * self.question.sample_tokens
        if self.throughput is None or tokens > _MAX_EXTRAPOLATION * self.throughput.points[-1][0]:
            return None
        return self.throughput.at(tokens) / self.question.sample_tokens * len(self.ranks)


def solve(question: Question, known: PlannerEvidence) -> Solution:
    """Splits the effective batch over the devices: by the split that the question fixes, if there is one;
    otherwise in as few accumulation steps as memory allows, with micro-batches no larger than the size
    beyond which throughput stops growing.

    If the model may be sharded, the solution is the first that fits of ddp and the stages of fsdp: each
    divides more among the devices, and exchanges more. If none fits, and not even one sample fits beside a
    full copy of the model, the solution is the one that divides the most, if it needs less.
    """
    copied = _solve_as(question, known)
    if copied.fits or not _may_shard(question):
        return copied
    divided = copied
    for stage in ZERO_STAGES:
        divided = _solve_as(replace(question, strategy="fsdp", zero_stage=stage), known)
        if divided.fits:
            return divided
    fits_one = all(rank.capacity.largest for rank in copied.ranks)
    return copied if fits_one else min(copied, divided, key=_peak)


def _peak(solution: Solution) -> int:
    return solution.tightest.memory.peak_process_bytes


def _may_shard(question: Question) -> bool:
    return question.may_shard and is_shardable(question.recipe) and len(question.devices) > 1


def _solve_as(question: Question, known: PlannerEvidence) -> Solution:
    """The solution with the question's strategy."""
    estimate = _estimate(question, known)
    throughput = known.throughput(question.recipe, question.sequence)
    hidden_size = known.architecture.hidden_size if known.architecture else None
    by_kind: dict[Device, Capacity] = {}
    for device in question.devices:
        alike = replace(device, id=0)
        if alike not in by_kind:
            by_kind[alike] = capacity_of(alike, question, estimate, throughput, hidden_size)
    capacities = [replace(by_kind[replace(device, id=0)], device=device) for device in question.devices]
    rules, sizes, adjusted = _split(question, capacities)
    ranks = [
        Rank(capacity, rule, own, estimate.memory(own.largest or 1, accumulating=len(own) > 1))
        for capacity, rule, own in zip(capacities, rules, sizes, strict=True)
    ]
    return Solution(question, ranks, estimate, throughput, adjusted)


def _estimate(question: Question, known: PlannerEvidence) -> Estimate:
    """The memory of one of the question's devices."""
    estimate = _estimate_of_sequences(question, known)
    several = question.sequences_per_sample
    return estimate if several == 1 else OfSamples(estimate, several)


def _estimate_of_sequences(question: Question, known: PlannerEvidence) -> Estimate:
    ranks = len(question.devices)
    if ranks == 1 or known.architecture is None:
        return known.estimates(question.recipe, question.sequence)
    estimate = known.estimates(
        recipe_of_rank(question.recipe, ranks, question.strategy, question.zero_stage), question.sequence
    )
    return estimate if question.strategy == "fsdp" else WithGradientBuffers(estimate, question.compresses)


def recipe_of_rank(recipe: Recipe, ranks: int, strategy: Strategy | None, stage: ZeroStage) -> Recipe:
    """The recipe of each rank's step if there are several."""
    if strategy == "independent":
        return recipe
    own = recipe.model_copy(update={"direct_sums": False})
    return own.model_copy(update={"parts": ranks, "zero_stage": stage}) if strategy == "fsdp" else own


def capacity_of(
    device: Device,
    question: Question,
    estimate: Estimate,
    throughput: Throughput | None,
    hidden_size: int | None,
) -> Capacity:
    """The capacity of one device, for a model of that width (None: not known)."""
    limit, sequence = question.limits.budget(device.memory_bytes), question.sample_tokens
    largest = largest_micro_batch(estimate, limit)
    alone = largest_micro_batch(estimate, limit, accumulating=False)

    def useful(samples: int) -> int:
        return _useful_tokens(samples, question, device, throughput, hidden_size)

    tokens, allowed = useful(largest), _allowed_tokens(largest, question)
    unpadded = None
    if not question.recipe.packing:  # which is laid out without padding by itself
        unpadded = unpadded_tokens(throughput, device.kind, allowed, hidden_size)
    return Capacity(
        device=device,
        limit_bytes=limit,
        largest=largest,
        largest_alone=alone,
        useful=max(1, tokens // sequence),
        useful_alone=max(1, useful(alone) // sequence),
        useful_tokens=tokens,
        unpadded_tokens=unpadded if unpadded is not None and unpadded > tokens else None,
    )


def _useful_tokens(
    largest: int, question: Question, device: Device, throughput: Throughput | None, hidden_size: int | None
) -> int:
    """Tokens of the smallest micro-batch, up to `largest` samples, that is as fast as any larger one."""
    tokens = _allowed_tokens(largest, question)
    useful = useful_tokens(throughput, device.kind, tokens, hidden_size)
    return min(tokens, ceil(useful / _BUDGET_STEP) * _BUDGET_STEP)


def _allowed_tokens(largest: int, question: Question) -> int:
    """Tokens of a micro-batch of `largest` samples, or of as many as the request allows."""
    samples = max(1, largest if question.at_most is None else min(largest, question.at_most))
    return samples * question.sample_tokens


def _split(
    question: Question, capacities: list[Capacity]
) -> tuple[list[MicroBatchRule], list[MicroBatches], str | None]:
    """Each device's rule, its micro-batches at full length, and a warning if the request was changed."""
    if question.is_planned:
        return *_planned(question, capacities), None
    split, devices = question.split, len(capacities)
    batch = question.effective_batch or (split.micro_batch_size or 1) * devices
    by_device = split.steps_by_device
    together = sum(by_device) if by_device else (split.accumulation_steps or 1) * max(split.devices, devices)
    micro_batches = min(batch, together)
    requested = split.micro_batch_size or ceil(batch / micro_batches)
    steps = ceil(batch / (requested * devices))
    fitting = max(1, min(capacity.largest_in(steps) for capacity in capacities))
    if question.shrink_to_fit and fitting < requested:
        changed = (
            f"micro-batches of {requested} samples are predicted not to fit and were reduced to at most "
            f"{fitting}; the effective batch is unchanged"
        )
        return [FixedSize(samples=fitting)] * devices, split_over(batch, [fitting] * devices), changed
    if split.micro_batch_size is not None and not by_device:
        return [FixedSize(samples=requested)] * devices, split_over(batch, [requested] * devices), None
    each = even(batch, micro_batches)
    sizes = [each.chosen(slice(start, None, devices)) for start in range(devices)]
    if by_device and len(by_device) == devices:
        ends = [0, *accumulate(by_device)]
        sizes = [each.chosen(slice(start, end)) for start, end in pairwise(ends)]
    return [FixedCount(micro_batches=max(1, len(own))) for own in sizes], sizes, None


def _planned(
    question: Question, capacities: list[Capacity]
) -> tuple[list[MicroBatchRule], list[MicroBatches]]:
    """One micro-batch per device if the batch fits in a single pass only as long as no earlier gradients are
    held. Otherwise, and for batches that change and tuning runs, token budgets."""
    useful = [capacity.useful for capacity in capacities]
    alone = [capacity.useful_alone for capacity in capacities]
    batch = question.effective_batch or min(MAX_DEFAULT_BATCH, sum(useful))
    if question.constant_batch and not question.tunes and sum(useful) < batch <= sum(alone):
        sizes = [MicroBatches(share, 1) if share else NO_MICRO_BATCH for share in shares(batch, alone)]
        return [FixedCount(micro_batches=1)] * len(sizes), sizes
    whole = max(_LEAST_BUDGET, batch * question.sample_tokens) if question.constant_batch else inf
    budgets: list[MicroBatchRule] = [
        TokenBudget(tokens=int(min(capacity.useful_tokens, whole)), unpadded_tokens=capacity.unpadded_tokens)
        for capacity in capacities
    ]
    return budgets, split_over(batch, useful)


_LEAST_BUDGET = 4096
"""A token budget is at most a whole batch, but this limit is never below 4,096 tokens, since the trainer also
derives the fixed cost of a micro-batch from the budget (`batches.fixed_cost`)."""


def alternatives(solution: Solution, known: PlannerEvidence) -> list[Alternative]:
    """The alternatives, as changes to a request: those that fit first, then by how little they change the
    training."""
    question, beside = solution.question, known
    if known.architecture is not None:
        estimates = comparable_estimates(
            known.estimates, known.architecture, question.recipe, question.sequence
        )
        beside = replace(known, estimates=estimates)
    base = replace(question, strategy="ddp") if question.may_shard else question
    found = []
    if solution.micro_batch > 1:
        found.append(_with_smaller_micro_batches(solution, base, beside))
    for change in changes(question.recipe, question.sequence):
        other = replace(base, recipe=change.recipe, sequence=change.sequence)
        found.append(_alternative(change.description, solve(other, beside), is_planned=question.is_planned))
    if question.recipe.device == "cuda":
        devices = [*question.devices, *question.devices]
        split = question.split.model_copy(update={"devices": len(devices)})
        more = solve(replace(base, devices=devices, split=split), beside)
        found.append(_alternative(f"num_gpus: {len(devices)}", more, is_planned=question.is_planned))
    return sorted(found, key=lambda alternative: not alternative.fits)


def _with_smaller_micro_batches(
    solution: Solution, question: Question, known: PlannerEvidence
) -> Alternative:
    """The alternative of a fixed micro-batch, at most half as large, that is the same on each device."""
    at_most = min(solution.micro_batch // 2, MAX_MICRO_BATCH)
    planned = solve(replace(question, split=PLANNED, at_most=at_most), known)
    share = ceil(planned.effective_batch / len(planned.ranks))
    largest = min(at_most, share, *(rank.capacity.useful for rank in planned.ranks))
    size = ceil(share / ceil(share / largest))
    split = PLANNED.model_copy(update={"micro_batch_size": size, "devices": len(question.devices)})
    fixed = solve(replace(question, split=split, shrink_to_fit=False), known)
    return _alternative(f"micro_batch_size: {size}", fixed, is_planned=False)


def _alternative(change: str, solution: Solution, *, is_planned: bool) -> Alternative:
    """An alternative.

    Args:
        is_planned: whether the planner would choose the micro-batch. A requested one is refused if it takes
            too many accumulation steps.
    """
    return Alternative(
        change=change,
        fits=solution.fits and (is_planned or solution.steps <= MAX_ACCUMULATION_STEPS),
        micro_batch_size=solution.micro_batch,
        accumulation_steps=solution.steps,
        peak_process_bytes=solution.tightest.memory.peak_process_bytes,
        one_sample_bytes=solution.estimate.memory(1).peak_process_bytes,
        source=solution.estimate.source,
        zero_stage=solution.question.zero_stage if solution.is_sharded else None,
        predicted_samples_per_second=solution.samples_per_second,
    )
