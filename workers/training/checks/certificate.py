"""The equivalence certificate: compares the gradients of two splits of the first window before training.

head_check.py checks separately that the trained loss is the model's own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.contract.plan import FixedCount, FixedSize, TokenBudget
from workers.training.accumulate import (
    divide,
    reduce_memory,
    restart_in_less_memory,
)
from workers.training.checks.gradient_error import gradient_error
from workers.training.data.batch_loader import Indices
from workers.training.data.preparation import Samples
from workers.training.devices import device_errors
from workers.training.exceptions import CannotTrain, InterruptionRequested, OtherRankFailed
from workers.training.gradients.direct_sums import DirectSums
from workers.training.gradients.gradient_sums import InPlace
from workers.training.kernels.selection import model_kernels
from workers.training.losses.loss import TokenLoss
from workers.training.losses.window_scope import run_prepass
from workers.training.micro_batches.batches import Groups, cut_window
from workers.training.models.dropout import without_randomness
from workers.training.models.model_parts import is_mixture_of_experts
from workers.training.models.parameters import Parameters
from workers.training.models.precision import TOLERANCE, copy_in_fp64
from workers.training.passes import filler, passes_of_rank
from workers.training.recovery.decision import WindowOutcome
from workers.training.replica import Replica
from workers.training.start import whole_model
from workers.training.training_run import TrainingRun
from workers.training.window import Window

TOLERANCE_IN_FP64 = 1e-6
"""Larger than fp64 rounding, since norm layers' sums and eager attention's softmax are always in fp32."""

_MOST_OPERATIONS_IN_FP64 = 5e12
"""The most floating-point operations of the comparison on the host: about a minute."""
_OPERATIONS_PER_WEIGHT = 24
"""Per weight and token of the longest sample: forward (2) and backward (4) in two splits, and as much again
for the other samples, which are shorter."""


@dataclass(frozen=True)
class Certificate:
    """Relative differences; `gradient_error` is |plan - reference| / |reference| over all parameters."""

    gradient_error: float
    micro_batches: int
    reference_micro_batches: int
    compression_error: float | None = None
    """How much sending gradients in 16 bits changes the gradient, |compressed - exact| / |exact|; None if
    they are sent exactly."""


Split = list[Groups]
"""The micro-batches of each rank."""


def by_autograd(loss: TokenLoss) -> AbstractContextManager[None]:
    """Computes gradients without `DirectSums`, so that the comparison verifies these, too."""
    return nullcontext() if loss.direct is None else loss.direct.suspended()


def other_split(plan: Groups, joined: Sequence[int] = ()) -> Groups:
    """Splits every micro-batch in two; if all are single samples, reverses their order and puts the samples
    in `joined` into one micro-batch."""
    if all(len(group) == 1 for group in plan):
        apart = [group for group in plan[::-1] if group[0] not in joined]
        return [*apart, *([list(joined)] if joined else [])]
    halves = [(group[: (len(group) + 1) // 2], group[(len(group) + 1) // 2 :]) for group in plan]
    return [half for pair in halves for half in pair if half]


def samples_to_join(training: TrainingRun, window: Indices) -> list[int]:
    """Positions of a window's two shortest samples, to be joined for the comparison even if the plan keeps
    all samples apart: later micro-batches may hold several, since a larger token budget may be tried, and
    later samples may be shorter. Empty if no micro-batch ever holds several samples, or these two are
    predicted not to fit."""
    plan, lengths = training.assignment.plan, training.loader.lengths(window)
    is_budget = isinstance(training.budgets[0].rule(training.batch), TokenBudget)
    if not is_budget or plan.most_tokens is None or len(window) < 2:
        return []
    pair = np.argsort(lengths, kind="stable")[:2]
    above = training.loader.layout.separate_above
    together = cut_window(lengths[pair], FixedSize(samples=2), separate_above=above)
    fits = 2 * int(lengths[pair[1]]) <= plan.most_tokens
    return pair.tolist() if len(together) == 1 and fits else []


def changed_choices(chosen: Sequence[Tensor]) -> int:
    """How many expert choices of a mixture differ between two splits: near ties that rounding decides."""
    first, second = chosen[:2]  # later ones are of other comparisons
    return int((first - second).abs().sum().item() / 2)


class _Failed(Exception):
    """A rank could not accumulate its part of a split."""

    def __init__(self, groups: list[Groups], outcome: WindowOutcome) -> None:
        super().__init__()
        self.groups, self.outcome = groups, outcome


def certify(training: TrainingRun) -> None:
    """Compares the next window's gradient under the plan with that of another split, before the first
    step. With several ranks, rank 0 computes the other split alone. Both are sent exactly; what
    compression changes is measured separately.

    Raises:
        CannotTrain: they differ by more than rounding.
        InterruptionRequested: an interruption was requested.
    """
    spec, state, replica = training.assignment.spec, training.state, training.replica
    if not spec.certificate or spec.clip_mode == "each_micro_batch":
        return
    if state.fallbacks.equivalence_error is not None or state.step or training.finished:
        return
    window = _window_to_compare(training)
    denominator = training.loader.samples.denominator(window)
    if denominator == 0.0:
        return
    chosen: list[Tensor] = []

    def accumulate(groups: list[Groups]) -> None:
        with by_autograd(replica.token_loss) if groups is reference else nullcontext():
            failed = _accumulate(training, window, groups, denominator)
        if failed is not None:
            raise _Failed(groups, failed)
        if replica.balance is not None and replica.balance.scope == "window":
            chosen.append(replica.balance.chosen())

    # Ranks with parts of a model could not go on after running out of memory.
    joined = [] if replica.is_sharded else samples_to_join(training, window)
    while True:
        plan = divide(training, window)
        on_leader = _all_on_one(training, window, plan)
        pair = joined if all(len(group) == 1 for group in on_leader) else []
        reference = [other_split(on_leader, pair), *([] for _ in plan[1:])]
        failed, error, compression_error = None, 0.0, None
        chosen.clear()
        try:
            with without_randomness(replica.model):
                with _sent_exactly(replica):
                    error = gradient_error(replica.window, accumulate, plan, reference)
                if replica.compression is not None:
                    compression_error = _compression_error(replica, accumulate, plan)
        except _Failed as failure:
            failed = failure
        if failed is not None:
            if failed.outcome.interruption_requested:
                raise InterruptionRequested
            if pair and failed.groups is reference:
                joined = []  # two samples do not fit, so no micro-batch will hold several
                continue
            ranks, lengths = failed.outcome.out_of_memory_on, training.loader.lengths(window)
            reduce_memory(training, failed.groups, ranks, lengths)
            continue
        error, compression_error = training.group.broadcast((error, compression_error))
        scale = replica.loss_scale
        if np.isfinite(error) or scale is None:
            break
        if scale.value <= scale.smallest:
            scale.restore()
            break
        scale.overflowed()
    certified = Certificate(error, sum(map(len, plan)), sum(map(len, reference)), compression_error)
    _report(training, window, certified, changed_choices(chosen) if chosen else 0)


def _window_to_compare(training: TrainingRun) -> Indices:
    """The samples of the next window, but of a full batch: a ramp may begin with a sample or two, which no
    split changes. If none of them trains anything, the first samples of the data that do."""
    spec, samples = training.assignment.spec, training.loader.samples
    size = max(training.batch, spec.effective_batch_size)
    window = training.loader.window(training.state.position.cursor, size)
    if len(_that_differ(samples, window[samples.targets[window] > 0])):
        return window
    others = itertools.islice(_differing(samples, np.flatnonzero(samples.targets)), size)
    return np.fromiter(others, dtype=np.int64)


def _that_differ(samples: Samples, window: Indices) -> Indices:
    """The samples whose two answers are not the same (the gradient of a pair of equal ones is nothing but
    rounding); with objectives that such a pair trains, all."""
    return np.fromiter(_differing(samples, window), dtype=np.int64)


def _differing(samples: Samples, window: Indices) -> Iterator[int]:
    objective = samples.objective
    if objective is None or not objective.compares_answers_only:
        return iter(window.tolist())
    return (sample for sample in window.tolist() if not samples.has_equal_answers(sample))


def _sent_exactly(replica: Replica) -> AbstractContextManager[None]:
    return nullcontext() if replica.compression is None else replica.compression.switched_off()


def _compression_error(
    replica: Replica, accumulate: Callable[[list[Groups]], None], plan: list[Groups]
) -> float:
    """|compressed - exact| / |exact| of one window's gradient over all parameters.

    Args:
        accumulate: opens the window and adds the micro-batches of a split, without any randomness.
    """

    def send(exactly: bool) -> None:
        with _sent_exactly(replica) if exactly else nullcontext():
            accumulate(plan)

    return gradient_error(replica.window, send, False, True)


def _all_on_one(training: TrainingRun, window: Indices, plan: list[Groups]) -> Groups:
    """The window's micro-batches if rank 0 takes all of it; the same on every rank. If the plan fixes a
    number of micro-batches for each rank, it is their sum."""
    leader = training.budgets[0]
    rule = leader.rule(training.batch)
    if len(plan) == 1 or isinstance(rule, FixedCount):
        return [group for groups in plan for group in groups]
    return leader.cut(training.loader.lengths(window), rule)


def _accumulate(
    training: TrainingRun, window: Indices, groups: list[Groups], denominator: float
) -> WindowOutcome | None:
    """Accumulates a split over all ranks. Returns what happened if any of them failed."""
    replica = training.replica
    out_of_memory = interruption_requested = False
    try:
        own = groups[training.group.rank]
        replica.window.open(denominator, len(own), passes=passes_of_rank(training, groups))
        run_prepass(training, window, groups, training.group)
        for group in own:
            training.check_interruption()
            replica.add(training.loader.fetch(window[group].tolist()))
        for _ in range(passes_of_rank(training, groups) - len(own)):
            replica.add_nothing(filler(training, window))
        replica.window.wait_until_added()
    except InterruptionRequested:
        interruption_requested = True
    except OtherRankFailed:
        pass
    except RuntimeError as error:
        if not device_errors.is_out_of_memory(error):
            raise
        if replica.is_sharded:
            raise restart_in_less_memory(training, window, groups) from error
        out_of_memory = True
    return replica.window.exchange(out_of_memory=out_of_memory, interruption_requested=interruption_requested)


def error_in_fp64(training: TrainingRun, window: Indices, model: Any) -> float | None:
    """Compares gradients in fp64, with a copy of the model on the host: those of a few samples in one
    micro-batch and one by one. Returns None if the model cannot be copied or converted, or if memory is
    insufficient.

    A change in the last bit of a ReLU unit's input can turn the unit on or off, which changes the gradient
    by far more than rounding does. In fp64 the last bit is so small that this is unlikely.
    """
    samples, replica = training.loader.samples, training.replica
    few = _few(window, samples, sum(each.numel() for each in model.parameters()))
    if not len(few):
        return None
    try:
        with model_kernels(replica.kernels):
            model = copy_in_fp64(model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        loss = TokenLoss(model, smoothing=training.assignment.spec.label_smoothing)
        loss.head = loss.head if replica.token_loss.head is not None else None
        loss.direct = DirectSums(model)
        if training.assignment.spec.objective is not None:
            loss.begin_objective(training.assignment.spec.objective)
        loss.objective = replica.token_loss.objective
        twin = replace(
            replica,
            device=torch.device("cpu"),
            precision="fp32",  # no autocast
            model=model,
            parameters=Parameters(model),
            window=Window(
                parameters, torch.optim.SGD(parameters), gradients=InPlace(parameters, loss.direct)
            ),
            token_loss=loss,
            balance=None,
        )

        def accumulate(groups: Groups) -> None:
            with by_autograd(loss) if groups is one_by_one else nullcontext():
                twin.window.open(samples.denominator(few))
            for group in groups:
                twin.add(training.loader.fetch_on(twin.device, few[group].tolist()))

        together = cut_window(
            samples.lengths[few],
            FixedSize(samples=len(few)),
            separate_above=training.loader.layout.separate_above,
        )
        one_by_one = [[each] for each in range(len(few))]
        with model_kernels(replica.kernels), without_randomness(model):
            found = gradient_error(twin.window, accumulate, together, one_by_one)
    except (RuntimeError, TypeError, MemoryError):  # no copy, no fp64 in some layer, or not enough memory
        return None
    return found


def _few(window: Indices, samples: Samples, parameters: int) -> Indices:
    """Samples of a window to compare in fp64: the two shortest; and, of the samples short enough to
    compare in time, the longest and one other. A model may mix samples only beyond a certain length.

    Args:
        parameters: of the model.
    """
    counted = _that_differ(samples, window[samples.targets[window] > 0])
    ordered = counted[np.argsort(samples.lengths[counted], kind="stable")]
    most = _MOST_OPERATIONS_IN_FP64 / (_OPERATIONS_PER_WEIGHT * max(1, parameters))
    longest = max(int(np.searchsorted(samples.lengths[ordered], most, side="right")), 2) - 1
    chosen = sorted({0, 1, (longest + 1) // 2, longest} & set(range(len(ordered))))
    return ordered[chosen]


def _report(training: TrainingRun, window: Indices, certified: Certificate, flips: int) -> None:
    """Records the certificate as an event; raises if it fails."""
    error, tolerance = certified.gradient_error, TOLERANCE[training.assignment.plan.precision]
    figures = {"tolerance": tolerance, "routing_flips": flips, **vars(certified)}
    if not np.isfinite(error):
        message = "This window's gradient is not finite: the gradient check is repeated in the next window."
        training.reporter.event("certificate", message, "warning", **{**figures, "gradient_error": None})
        return
    training.state.fallbacks.equivalence_error = error
    if certified.compression_error is not None:
        message = (
            f"Sending gradients in {training.assignment.spec.gradient_compression} changes the first "
            f"window's gradient by {certified.compression_error:.1e}, so training approximates that of one "
            "device."
        )
        training.reporter.event("compression", message, "warning", error=certified.compression_error)
    splits = f"{certified.micro_batches} and {certified.reference_micro_batches} micro-batches"
    hidden = _hidden_error(training, window) if error <= tolerance else None
    if hidden is not None:
        raise CannotTrain(
            "not_equivalent",
            f"in fp64, the gradient of a few samples differs by {hidden:.1e} between one micro-batch and "
            f"several: {_MIXES}",
        )
    if error <= tolerance:
        message = (
            f"The first window's gradient differs by {error:.1e} between {splits} (tolerance {tolerance:g})."
        )
        training.reporter.event("certificate", message, **figures)
    elif (exact := _leaders_error_in_fp64(training, window)) is not None and exact <= TOLERANCE_IN_FP64:
        what = f"changes {flips} expert choices" if flips else "switches some of the model's units on or off"
        message = (
            f"The first window's gradient differs by {error:.1e} between {splits}, more than the usual "
            f"{tolerance:g} in {training.assignment.plan.precision}; in fp64 it differs by only {exact:.1e}. "
            f"Rounding {what}; the model does not mix samples."
        )
        training.reporter.event("certificate", message, "warning", **figures, error_in_fp64=exact)
    elif exact is None and (flips or _may_change_uncounted_choices(training)):
        changed = f"changed {flips} expert choices" if flips else "may have changed expert choices"
        message = (
            f"The first window's gradient differs by {error:.1e} between {splits}: rounding {changed}. The "
            "comparison could not be repeated in fp64: the memory does not suffice, or the model cannot be "
            "converted."
        )
        training.reporter.event("certificate", message, "warning", **figures)
    else:
        raise CannotTrain(
            "not_equivalent",
            f"the first window's gradient differs by {error:.1e} between {splits}, more than the "
            f"{tolerance:g} that rounding explains in {training.assignment.plan.precision}: {_MIXES}",
        )


def _may_change_uncounted_choices(training: TrainingRun) -> bool:
    """Whether the model is a mixture of experts that does not report its choices."""
    balance = training.replica.balance
    return is_mixture_of_experts(training.replica.model) and (balance is None or balance.scope != "window")


_MIXES = (
    "this model computes a sample differently beside other samples, so gradient accumulation would change "
    "what it learns. To train anyway, set equivalence_check: false"
)
_MOST_WITHOUT_SUSPICION = 2e11
"""Up to this many operations, the comparison is made in fp64 even if 16 bits show nothing: they hide small
differences."""


def _hidden_error(training: TrainingRun, window: Indices) -> float | None:
    """The difference in fp64, if it is more than rounding, and the plan's precision would hide it."""
    precision = training.assignment.plan.precision
    weights = sum(each.numel() for each in training.replica.model.parameters())
    tokens = int(training.loader.samples.lengths[_few(window, training.loader.samples, weights)].sum())
    small = _OPERATIONS_PER_WEIGHT * weights * tokens <= _MOST_WITHOUT_SUSPICION
    if precision == "fp32" or training.replica.is_sharded or not small:
        return None
    error = _leaders_error_in_fp64(training, window)
    return error if error is not None and error > TOLERANCE["fp32"] else None


def _leaders_error_in_fp64(training: TrainingRun, window: Indices) -> float | None:
    """Rank 0's `error_in_fp64`, for which the other ranks wait."""
    model = whole_model(training)
    found: float | None = training.group.broadcast(
        error_in_fp64(training, window, model) if training.group.leads else None
    )
    return found
