"""Estimates a step's memory: from a profile if there is one, otherwise by formula."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from app.contract.architecture import Architecture
from app.contract.memory_profile import Curve, PointMemory, Recipe
from app.contract.plan import Source
from app.planning.interpolation import interpolated
from app.planning.memory import (
    Memory,
    context_bytes,
    copies_in_half_precision,
    step_memory,
    workspace_bytes,
)

MOST_ROWS = 2**20


class Estimate(Protocol):
    """Memory of a step as a function of its micro-batch, and how far that can be trusted."""

    @property
    def source(self) -> Source: ...

    @property
    def expected_error(self) -> float | None:
        """The mean absolute relative error of this source on such devices; None: not measured."""

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        """Memory at the peak of a steady-state step, in a window of several micro-batches or of one.

        Args:
            rows: rows of the micro-batch, or its padded tokens divided by the sequence length.
        """
        ...


@dataclass(frozen=True)
class ByFormula:
    """An estimate from sizes alone: instant, and the least precise."""

    architecture: Architecture
    recipe: Recipe
    sequence: int
    expected_error: float | None = None
    source: Source = "formula"

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        return step_memory(self.architecture, self.recipe, rows, self.sequence)


_WHOLE_LAYERS = 2


@dataclass(frozen=True)
class BySharding:
    """An estimate for a rank that holds only a part of the model (fsdp), from that of the whole model.

    A rank keeps 1/N of the weights, gradients and optimizer states. In ZeRO stage 3, a layer's weights are
    whole while it runs, and so are those of the next layer, which are fetched ahead; in the backward pass, so
    are the layer's gradients. What is outside of the layers (embeddings and output head) stays whole during a
    step (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). In stages 1 and 2, all
    weights are whole during a step, and in stage 1, so are all gradients until they are exchanged layer by
    layer."""

    whole: Estimate
    """The estimate for one device that holds the whole model."""
    architecture: Architecture
    recipe: Recipe
    expected_error: float | None = None
    source: Source = "formula"

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        whole, ranks = self.whole.memory(rows, accumulating=accumulating), self.recipe.parts
        outside = min(1.0, 2 * self.architecture.vocabulary * self.architecture.hidden_size
                      / self.architecture.parameters)  # fmt: skip
        layer = (1 - outside) / self.architecture.layers
        together = outside + _WHOLE_LAYERS * layer
        # Adapters' copies are divided, since they are few.
        copies = 0 if self.recipe.lora else copies_in_half_precision(self.architecture, self.recipe)
        kept = whole.weights_bytes - copies
        stage = self.recipe.zero_stage
        return whole.model_copy(
            update={
                "weights_bytes": int(
                    kept / ranks + (kept * together + copies if stage == 3 else whole.weights_bytes)
                ),
                "gradients_bytes": int(
                    whole.gradients_bytes * (1 + layer if stage == 1 else 1 / ranks + together)
                ),
                "optimizer_bytes": whole.optimizer_bytes // ranks,
            }
        )


@dataclass(frozen=True)
class WithGradientBuffers:
    """An estimate for a rank that keeps its gradient buffers between windows (ddp), so that gradients are in
    memory during every micro-batch, the first one included."""

    alone: Estimate
    compresses: bool = False
    """Whether gradients are sent in 16 bits: buffers for what is sent and what is received then take up to
    as much as gradients in fp32."""

    @property
    def source(self) -> Source:
        return self.alone.source

    @property
    def expected_error(self) -> float | None:
        return self.alone.expected_error

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        memory = self.alone.memory(rows, accumulating=True)
        if not self.compresses:
            return memory
        buffers = memory.gradients_bytes
        return memory.model_copy(update={"workspace_bytes": memory.workspace_bytes + buffers})


@dataclass(frozen=True)
class OfSamples:
    """An estimate for samples of several sequences, such as pairs; `rows` are then samples."""

    of_sequences: Estimate
    sequences: int

    @property
    def source(self) -> Source:
        return self.of_sequences.source

    @property
    def expected_error(self) -> float | None:
        return self.of_sequences.expected_error

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        return self.of_sequences.memory(rows * self.sequences, accumulating=accumulating)


@dataclass(frozen=True)
class ByProfile:
    """An estimate from a simulated profile."""

    curve: Curve
    recipe: Recipe
    source: Source
    expected_error: float | None = None

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        line = self._highest(rows, accumulating)
        part = {kind: int(bytes_) for kind, bytes_ in line.by_kind(rows).items()}
        return Memory(
            weights_bytes=part["weights"],
            gradients_bytes=part["gradients"],
            optimizer_bytes=part["optimizer"],
            activations_bytes=part["activations"],
            logits_bytes=part["logits"],
            workspace_bytes=part["workspace"] + workspace_bytes(self.recipe.device),
            context_bytes=context_bytes(self.recipe),
            reserved_over_allocated=self._reserved_ratio(rows),
        )

    def _highest(self, rows: float, accumulating: bool) -> PointMemory:
        stretch = next(
            (each for each in reversed(self.curve.stretches) if each.rows <= rows), self.curve.stretches[0]
        )
        lines = stretch.accumulating if accumulating else stretch.once
        return max(lines, key=lambda line: line.bytes(rows))

    def _reserved_ratio(self, rows: float) -> float:
        """The ratio of reserved to allocated bytes: 1 on a CPU, on a GPU interpolated."""
        if self.recipe.device == "cpu":
            return 1.0
        return interpolated(self.curve.reserved, rows)


@dataclass(frozen=True)
class MeasuredPeak:
    """A measured peak in bytes: allocated on a GPU, of the whole process on a CPU."""

    tokens: int
    accumulating: bool
    bytes: int


@dataclass(frozen=True)
class ByMeasurement:
    """Peaks measured with this recipe on this kind of device. At other sizes: the prediction plus its
    measured error, interpolated linearly between the points and constant beyond them.
    """

    prediction: Estimate
    device: Literal["cpu", "cuda"]
    sequence: int
    points: tuple[MeasuredPeak, ...]
    """The measured points by increasing tokens; at least one."""
    expected_error: float | None = None
    source: Source = "measured"

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        predicted = self.prediction.memory(rows, accumulating=accumulating)
        known = [(point.tokens / self.sequence, self._error_bytes(point)) for point in self.points]
        beyond = round(interpolated(known, rows))
        if self.device == "cpu":  # the process was measured, not what is allocated
            return predicted.model_copy(update={"context_bytes": max(0, predicted.context_bytes + beyond)})
        return predicted.model_copy(update={"workspace_bytes": max(0, predicted.workspace_bytes + beyond)})

    def _error_bytes(self, point: MeasuredPeak) -> int:
        """Measured minus predicted bytes."""
        memory = self.prediction.memory(point.tokens / self.sequence, accumulating=point.accumulating)
        return point.bytes - (
            memory.peak_process_bytes if self.device == "cpu" else memory.peak_allocated_bytes
        )


@dataclass(frozen=True)
class ByComparison:
    """An estimate by formula, scaled by the formula's known error for a similar step.

    Two steps can then be compared even if only one of them has a profile or measurements. What a step keeps
    (weights, gradients, optimizer states) and what it needs for a while (activations, logits, workspaces)
    are scaled separately: a change may affect only one of the two.
    """

    formula: Estimate
    known: Estimate
    known_by_formula: Estimate
    source: Source = "formula"

    @property
    def expected_error(self) -> float | None:
        return self.formula.expected_error

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        own, known, estimated = (
            estimate.memory(rows, accumulating=accumulating)
            for estimate in (self.formula, self.known, self.known_by_formula)
        )
        parts: dict[str, int] = {}
        for names in (*((name,) for name in _KEPT), _TEMPORARY, ("context_bytes",)):
            true, guess = (sum(getattr(memory, name) for name in names) for memory in (known, estimated))
            parts |= {name: round(getattr(own, name) * (true / guess if guess else 1.0)) for name in names}
        ratio = (
            own.reserved_over_allocated * known.reserved_over_allocated / estimated.reserved_over_allocated
        )
        return own.model_copy(update={**parts, "reserved_over_allocated": ratio})


_KEPT = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
_TEMPORARY = ("activations_bytes", "logits_bytes", "workspace_bytes")
"""Which of these there are at the peak depends on when it is, so they are scaled together."""


EstimateOf = Callable[[Recipe, int], Estimate]
"""The best estimate for a recipe and a length of sequence, in tokens."""


def by_formula(architecture: Architecture) -> EstimateOf:
    """Estimates by formula, from the architecture alone."""

    def estimate(recipe: Recipe, sequence: int) -> Estimate:
        whole = ByFormula(architecture, recipe, sequence)
        return whole if recipe.parts == 1 else BySharding(whole, architecture, recipe)

    return estimate


def comparable_estimates(
    estimates: EstimateOf, architecture: Architecture, recipe: Recipe, sequence: int
) -> EstimateOf:
    """Estimates for a step and its alternatives that can be compared with each other."""
    known, by_formula = estimates(recipe, sequence), ByFormula(architecture, recipe, sequence)

    def estimate_for(other: Recipe, length: int) -> Estimate:
        estimate = estimates(other, length)
        if estimate.source != "formula" or known.source == "formula":
            return estimate
        return ByComparison(estimate, known, by_formula)

    return estimate_for


def largest_micro_batch(estimate: Estimate, budget_bytes: int, *, accumulating: bool = True) -> int:
    """The most rows whose predicted process memory is within the budget; 0 if not even one row fits.

    Memory is piecewise linear in the rows, or convex if rows are packed. The cost of the next row shows where
    a straight line would reach the budget, and bisection corrects that.
    """

    def peak(rows: int) -> int:
        return estimate.memory(rows, accumulating=accumulating).peak_process_bytes

    low, peak_low, high = 1, peak(1), MOST_ROWS + 1
    if peak_low > budget_bytes:
        return 0
    while low + 1 < high:
        following = peak(low + 1)
        if following > budget_bytes:
            return low
        each = max(1, following - peak_low)
        probe = min(high - 1, low + 1 + (budget_bytes - following) // each)
        if (at_probe := peak(probe)) <= budget_bytes:
            low, peak_low = probe, at_probe
            continue
        low, peak_low, high = low + 1, following, probe  # a steeper piece follows: bisect
        middle = (low + high) // 2
        if (at_middle := peak(middle)) <= budget_bytes:
            low, peak_low = middle, at_middle
        else:
            high = middle
    return low
