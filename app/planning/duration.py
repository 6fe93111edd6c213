"""Predicts a run's duration from its amount of work and the speed of other jobs, while no job has trained
the same model yet.

A window's time is modelled as

    passes × seconds per layer + operations × seconds per operation

for forward and backward, and updated parameters × seconds per parameter for the optimizer. The rates are
those of the device. They start from a guess (the device's peak, of which training reaches about a third),
and follow the jobs that the device has finished; jobs of a similar size have the most weight.

The operations of a token follow Kaplan et al. 2020 (section 2.1): two per weight in the forward pass and four
in the backward pass, without the embedding table; and those of attention, which grow with the length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from app.contract.architecture import Architecture
from app.contract.spec import RunPrecision
from app.planning.data_sheets import similar_data_sheet
from app.planning.devices import Device


@dataclass(frozen=True)
class Work:
    """What a run, or a part of it, computes."""

    operations: float
    """Floating-point operations of forward and backward."""
    passes: float
    """Layers that micro-batches go through, forward and backward."""
    updates: float
    """Parameters updated, summed over steps."""


@dataclass(frozen=True)
class MeasuredWork:
    """Work that a job has done, and its time in seconds."""

    work: Work
    forward_backward_seconds: float
    optimizer_seconds: float


@dataclass(frozen=True)
class Duration:
    """A time in seconds, and the range in which it probably is (about nine of ten times)."""

    expected: float
    low: float
    high: float

    @classmethod
    def around(cls, expected: float, spread: float) -> "Duration":
        """A time whose logarithm has a standard deviation of `spread`."""
        factor = exp(_DEVIATIONS * spread)
        return cls(expected, expected / factor, expected * factor)

    def plus(self, seconds: float) -> "Duration":
        """This duration and a time that is known."""
        return Duration(self.expected + seconds, self.low + seconds, self.high + seconds)

    def divided(self, by: float) -> "Duration":
        """This duration if that many workers share the work."""
        return Duration(self.expected / by, self.low / by, self.high / by)


@dataclass(frozen=True)
class Rates:
    """A device's speed."""

    seconds_per_pass: float
    seconds_per_operation: float
    seconds_per_update: float
    spread: float
    """Standard deviation of log(predicted time / true time)."""

    def duration(self, work: Work, more_spread: float = 0.0) -> Duration:
        """The time of some work.

        Args:
            more_spread: the uncertainty of the amount of work, in the same unit as `spread`.
        """
        expected = (
            work.passes * self.seconds_per_pass
            + work.operations * self.seconds_per_operation
            + work.updates * self.seconds_per_update
        )
        return Duration.around(expected, sqrt(self.spread**2 + more_spread**2))


def work_of(
    architecture: Architecture,
    *,
    tokens: float,
    length: float,
    micro_batches: float,
    steps: float,
    adapters: bool,
    trained: int | None = None,
    checkpointing: bool = False,
) -> Work:
    """The work of training on some tokens.

    Args:
        tokens: with padding.
        length: the mean number of tokens of a row.
        adapters: whether only adapters are trained: the gradients of the weights below them are not computed.
        trained: parameters that are trained; None: all.
    """
    own = architecture
    attention = 2 * own.hidden_size * own.head_dim * (own.heads + own.key_value_heads)
    matrices = (3 if own.gated else 2) * own.active_experts
    feed_forward = matrices * own.hidden_size * own.intermediate_size
    weights = own.layers * (attention + feed_forward) + own.vocabulary * own.hidden_size
    forward = 2 * weights + 2 * own.layers * own.heads * own.head_dim * length
    times = (2 if adapters else 3) + checkpointing
    return Work(
        operations=float(tokens * forward * times),
        passes=float(micro_batches * own.layers * times),
        updates=float(steps * (own.parameters if trained is None else trained)),
    )


def fitted(device: Device, precision: RunPrecision, done: Sequence[MeasuredWork], work: Work) -> Rates | None:
    """The rates of a device for some work; None if nothing is known about such a device.

    Args:
        done: what the device has done in that precision.
    """
    guess = _guessed(device, precision)
    if guess is None:
        guess = _guess_from(done)
    if guess is None:
        return None
    known = [each for each in done if each.forward_backward_seconds > 0]
    if not known:
        return guess
    weights = [_similarity(each.work, work) for each in known]
    total = sum(weights)
    ratios = [log(each.forward_backward_seconds / _forward_backward(guess, each.work)) for each in known]
    scale = exp(sum(weight * ratio for weight, ratio in zip(weights, ratios, strict=True)) / total)
    per_pass, per_operation = _two_rates(
        known, weights, guess.seconds_per_pass * scale, guess.seconds_per_operation * scale
    )
    updated = [each for each in known if each.work.updates and each.optimizer_seconds]
    per_update = (
        sum(each.optimizer_seconds for each in updated) / sum(each.work.updates for each in updated)
        if updated
        else guess.seconds_per_update
    )
    found = Rates(per_pass, per_operation, per_update, 0.0)
    errors = [log(_forward_backward(found, each.work) / each.forward_backward_seconds) for each in known]
    squares = sum(weight * error**2 for weight, error in zip(weights, errors, strict=True))
    spread = sqrt((squares + _SPREAD_OF_ONE**2) / (total + 1))
    return Rates(per_pass, per_operation, per_update, max(spread, _LEAST_SPREAD))


_DEVIATIONS = 1.64
"""Standard deviations on each side that contain nine of ten values."""
_SPREAD_OF_ONE = 0.25
"""The spread that is assumed before any job has shown it; it counts as much as one job."""
_LEAST_SPREAD = 0.06
_SPREAD_OF_GUESS = 0.7
_HELD = 0.05
"""The weight of the guess in the fit, relative to one measured job."""
_REACHED = 0.33
"""The share of a device's peak that training reaches: 0.2 to 0.5 in published runs (Chowdhery et al. 2022,
table 3)."""

_GPU_SECONDS_PER_PASS, _CPU_SECONDS_PER_PASS = 2e-4, 5e-4
_GPU_SECONDS_PER_UPDATE, _CPU_SECONDS_PER_UPDATE = 3e-11, 2e-9
_CPU_OPERATIONS_PER_SECOND = 4e10


def _guessed(device: Device, precision: RunPrecision) -> Rates | None:
    """Rates from the device's data sheet."""
    if device.kind == "cpu":
        per_operation = 1 / _CPU_OPERATIONS_PER_SECOND
        return Rates(_CPU_SECONDS_PER_PASS, per_operation, _CPU_SECONDS_PER_UPDATE, _SPREAD_OF_GUESS)
    peak = _peak_of(device.name, precision)
    if peak is None:
        return None
    per_second = peak * 1e12 * _REACHED
    return Rates(_GPU_SECONDS_PER_PASS, 1 / per_second, _GPU_SECONDS_PER_UPDATE, _SPREAD_OF_GUESS)


def _peak_of(name: str, precision: RunPrecision) -> float | None:
    """The peak of a GPU in teraflops, by its name; of a slice of one (MIG), its share of that. None: not
    known."""
    sheet = similar_data_sheet(name)
    if sheet is None:
        return None
    slices = _SLICE.search(name.upper())
    share = 1.0 if slices is None else int(slices[1] or slices[2]) / sheet.mig_units
    return sheet.teraflops(precision) * share


_SLICE = re.compile(r"\bMIG (?:(\d)C\.)?(\d)G\.")
"""How nvidia-smi names slices: `1g` has one unit of compute, and `1c.3g` may use one of three."""


def _guess_from(done: Sequence[MeasuredWork]) -> Rates | None:
    """Rates of a device without a data sheet, from what it has done: all of its time for operations."""
    seconds = sum(each.forward_backward_seconds for each in done)
    operations = sum(each.work.operations for each in done)
    if not seconds or not operations:
        return None
    return Rates(1e-9, seconds / operations, _GPU_SECONDS_PER_UPDATE, _SPREAD_OF_GUESS)


def _forward_backward(rates: Rates, work: Work) -> float:
    return work.passes * rates.seconds_per_pass + work.operations * rates.seconds_per_operation


def _similarity(one: Work, other: Work) -> float:
    """1 for work with the same operations per pass (the size of a micro-batch's layer), less for others."""
    ratio = log((one.operations / one.passes) / (other.operations / other.passes))
    return exp(-0.5 * (ratio / log(10)) ** 2) + 1e-3


def _two_rates(
    done: Sequence[MeasuredWork], weights: Sequence[float], per_pass: float, per_operation: float
) -> tuple[float, float]:
    """The rates with the least relative errors, held to those given (ridge regression); neither is
    negative."""
    rows = [
        (
            weight,
            each.work.passes * per_pass / each.forward_backward_seconds,
            each.work.operations * per_operation / each.forward_backward_seconds,
        )
        for each, weight in zip(done, weights, strict=True)
    ]
    held = _HELD * sum(weights) / len(weights)
    aa = sum(weight * one * one for weight, one, _ in rows) + held
    bb = sum(weight * two * two for weight, _, two in rows) + held
    ab = sum(weight * one * two for weight, one, two in rows)
    a = sum(weight * one for weight, one, _ in rows) + held
    b = sum(weight * two for weight, _, two in rows) + held
    determinant = aa * bb - ab * ab
    if determinant <= 0:  # rounding, with extreme figures
        return per_pass, per_operation
    first, second = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if first < 0:
        first, second = 0.0, b / bb
    elif second < 0:
        first, second = a / aa, 0.0
    return first * per_pass, second * per_operation
