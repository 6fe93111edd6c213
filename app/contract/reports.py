"""What a trainer reports through its run directory: log lines, events, and the outcome.

Code inside a trainer may write anything there, so every number is bounded: sums over rows stay finite, and
fit into what a database and JSON can hold.
"""

import json
from collections.abc import Iterable
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from app.contract.base import Frozen
from app.contract.text import storable

Level = Literal["info", "warning", "error"]

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Steps, samples and micro-batches."""
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Tokens of one window."""
TokenTotal = Annotated[int, Field(ge=0, le=2**53)]
Bytes = Annotated[int, Field(ge=0, le=2**50)]
Number = Annotated[float, Field(ge=-1e40, le=1e40, allow_inf_nan=False)]
"""Covers every finite fp32 number."""
Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]

_LONGEST_TEXT = 10_000
_MOST_ITEMS = 1000
_DEEPEST = 6
_MOST_DATA_BYTES, _MOST_VALUES = 2**17, 5000
_LARGEST_INTEGER = 2**53
MOST_MICRO_LOSSES, MOST_NORMS = 10_000, 2_000
"""The most micro-batches and layers whose figures a log line has."""
MAX_REPLICAS = _MOST_RANKS = 64

Text = Annotated[str, AfterValidator(lambda text: storable(text[:_LONGEST_TEXT]))]
"""At most 10,000 characters; the rest is cut off."""
Name = Annotated[str, Field(max_length=255), AfterValidator(storable)]
Code = Annotated[str, Field(max_length=100), AfterValidator(storable)]


def _bounded(value: Any, depth: int = 0) -> Any:
    """A JSON value, cut where it is too long or too deep; non-finite numbers and integers beyond ±2^53 become
    null."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_INTEGER:
        return None
    if isinstance(value, list | tuple | dict) and depth == _DEEPEST:
        return None
    if isinstance(value, list | tuple):
        return [_bounded(each, depth + 1) for each in value[:_MOST_ITEMS]]
    if isinstance(value, dict):
        return {str(key)[:255]: _bounded(each, depth + 1) for key, each in list(value.items())[:_MOST_ITEMS]}
    return value


def _bounded_data(data: dict[str, Any]) -> dict[str, Any]:
    bounded: dict[str, Any] = _bounded(data)
    fits = len(json.dumps(bounded)) <= _MOST_DATA_BYTES and _count_values(bounded) <= _MOST_VALUES
    return bounded if fits else {}


def _count_values(value: Any) -> int:
    """How many values a JSON value consists of, itself included."""
    if isinstance(value, dict):
        return 1 + sum(map(_count_values, value.values()))
    return 1 + sum(map(_count_values, value)) if isinstance(value, list) else 1


def is_usable(kind: str, data: dict[str, Any]) -> bool:
    """Whether an event's data has the fields that results are computed from, as their type requires."""
    if kind not in ("checkpoint", "evaluation", "metric"):
        return True
    step = data.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**31:
        return False
    if kind == "checkpoint":
        return isinstance(data.get("name", ""), str)
    if kind == "metric":
        return isinstance(data.get("name"), str) and _is_number_or_none(data.get("value", ""))
    rewards = data.get("rewards")
    figures = [data.get("loss", ""), data.get("token_accuracy"), data.get("exact_match")]
    if rewards is not None:
        figures += rewards.values() if isinstance(rewards, dict) else [""]
    return all(map(_is_number_or_none, figures))


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


class NoiseScale(Frozen):
    """The gradient noise scale in samples: the trace of the gradient's covariance over its squared norm
    (McCandlish et al. 2018, section 2.2)."""

    value: Number
    low: Number
    """The lower end of the 90 % confidence interval."""
    high: Number | None
    """The upper end; None: unbounded, since the gradient's own norm cannot be distinguished from zero yet."""
    measurements: Count


class RankLine(Frozen):
    """What one of several ranks did in a window; the totals run over the whole job."""

    rank: Count
    micro_batches: Count
    samples: Count
    tokens: TokenCount
    """Tokens of its samples, without padding."""
    seconds: Seconds
    """Seconds in which its device worked on them."""
    idle_seconds: Seconds
    """Seconds in which it waited for the slowest rank."""
    peak_gb: Number | None
    """Its maximum memory so far in GiB: resident on a CPU, allocated on a GPU."""
    total_micro_batches: Count
    total_tokens: TokenTotal
    total_seconds: Seconds
    total_idle_seconds: Seconds


class LearnedLimits(Frozen):
    """What a rank has learned by running out of memory: the content of learned-0.json and others."""

    tokens: Count | None
    """The token budget from now on."""
    failed_tokens: Count | None
    """The smallest micro-batch that did not fit, in tokens."""
    checkpointing: bool
    """Whether activations must be recomputed."""


class RankShares(Frozen):
    """Shares of a window's tokens by rank, used after a step: a line of shares.jsonl."""

    step: Count
    shares: tuple[Number, ...]


class TuningStep(Frozen):
    """A decision about the token budget, made after a step: a line of tuning.jsonl."""

    step: Count
    state: dict[str, Any]
    """The trainer's own state after it (workers/training/checkpoints/state.py: LearnedTuning)."""


class Rewards(Frozen):
    """Means over pairs, or over labelled answers (of which the desirable ones are `chosen`, the others
    `rejected`). A reward is β times an answer's log-ratio to the reference model (dpo, kto), or β times its
    mean log-probability per token (orpo, simpo), or the model's score (reward)."""

    chosen: Number | None
    """Of the chosen or desirable answers."""
    rejected: Number | None
    """Of the rejected or undesirable answers."""
    margin: Number | None
    """`chosen` minus `rejected`."""
    accuracy: Number | None
    """The share of pairs whose chosen answer has the higher reward; null for labelled answers."""
    chosen_log_prob: Number | None
    """Mean over chosen answers of the summed log-probability of an answer's tokens, in nats."""
    rejected_log_prob: Number | None
    """The same of rejected answers."""
    divergence: Number | None = None
    """kto: the estimated divergence from the model that the job starts from, in nats."""


class LogLine(Frozen):
    """One optimizer step. Counters (`step`, `micro_step`, `skipped`) run over the whole job;
    `samples`, `tokens`, `loss` and times are those of this step's window."""

    attempt: Count
    step: Count
    """Weight updates so far."""
    micro_step: Count
    """Micro-batches so far."""
    batch_idx: Count
    """Index of the window in its epoch."""
    epoch: Count
    samples: Count
    loss: Number
    """Sum of the window's losses, divided by its target tokens, or by its samples with objectives
    other than sft."""
    loss_ema: Number
    gradient_accumulation_steps: Count
    effective_batch_size: Count
    physical_batch_size: Count
    """Samples of the largest micro-batch."""
    learning_rate: Number
    grad_norm: Number
    """Global norm of the window's gradient before clipping; under `each_micro_batch`, of the running sum
    after its clips."""
    tokens: TokenCount
    """Target tokens."""
    input_tokens: TokenCount
    """Tokens of the samples, including prompts but not padding."""
    padded_tokens: TokenCount
    """Rows × longest row, summed over the micro-batches: what the device worked on."""
    tokens_per_second: Number
    """Of `input_tokens`."""
    memory_gb: Number | None
    """Memory at the end of the window in GiB: resident on a CPU, allocated on a GPU."""
    peak_gb: Number | None
    noise_scale: Number | None
    skipped: Count
    time: Seconds
    """Unix seconds."""
    data_seconds: Seconds
    forward_backward_seconds: Seconds
    optimizer_seconds: Seconds
    synchronise_seconds: Seconds | None = None
    """The time to read the window's sums back from the device."""
    temperature_celsius: Number | None = None
    """The GPU's temperature when the worker read this line."""
    aux_loss: Number | None = None
    """The load-balancing loss of a mixture of experts, with the weight that it has in training."""
    micro_losses: Annotated[tuple[Number, ...], Field(max_length=MOST_MICRO_LOSSES)] | None = None
    """The mean loss of each micro-batch, on request."""
    largest_tokens: TokenCount | None = None
    """Tokens of the largest micro-batch, padding included."""
    gradient_norms: Annotated[dict[Name, Number], Field(max_length=MOST_NORMS)] | None = None
    """The gradient's norm by layer, before clipping, on request."""
    ranks: Annotated[tuple[RankLine, ...], Field(max_length=_MOST_RANKS)] | None = None
    """What each rank did; null with one device."""
    reserved_gb: Number | None = None
    """The most memory so far that PyTorch's allocator held on a GPU, in GiB; null on a CPU."""
    rewards: Rewards | None = None
    """What a preference objective, or reward, measured; null with others."""


class WindowProgress(Frozen):
    """How far the current window, or the preparation before the first one, has progressed: the content of
    progress.json."""

    attempt: Count
    step: Count
    """Weight updates before the current window."""
    micro_step: Count
    """Micro-batches so far, over the whole job."""
    accumulation_step: Count
    """Micro-batches of this window so far."""
    prepared_samples: Count | None = None
    """Samples tokenised so far or, in the next phase, scored by the reference model; null once training has
    begun."""
    samples_to_prepare: Count | None = None


class EventLine(Frozen):
    attempt: Count
    time: Seconds
    type: Code
    level: Level
    message: Text
    data: Annotated[dict[str, Any], AfterValidator(_bounded_data)]


EQUALLY_FAST_SHARE = 0.97
"""A micro-batch size whose rate is at least this share of the best rate counts as equally fast; the
smallest of these sizes is used."""


def smallest_of_the_fastest(measured: Iterable[tuple[int, float]]) -> int:
    """The smallest number of tokens whose rate is within 3 % of the best, from (tokens, rate) pairs."""
    pairs = list(measured)
    best = max(rate for _, rate in pairs)
    return min(tokens for tokens, rate in pairs if rate >= EQUALLY_FAST_SHARE * best)


class MeasuredSize(Frozen):
    """A micro-batch's size, measured on the job's own data and device."""

    token_budget: TokenCount
    micro_batches: Count
    """The number of micro-batches of the measured samples."""
    largest_tokens: TokenCount
    """The tokens of the largest micro-batch, padding included."""
    samples_per_second: Number
    """Forward and backward, without the optimizer."""
    tokens_per_second: Number
    """The samples' own tokens, padding not counted."""
    peak_bytes: Bytes | None
    """Peak memory, including the optimizer's states: allocated on a GPU, of the process on a CPU; None if it
    was not measured for this size."""


class Tuning(Frozen):
    """What a tuning run, or trials while training, measured of several micro-batch sizes. A tuning run
    chooses the smallest size that is about as fast as the fastest; trials keep a size that is faster by a
    margin."""

    token_budget: TokenCount
    """The chosen token budget."""
    samples: Count
    """Each size was measured on at least this many samples."""
    tried: Annotated[tuple[MeasuredSize, ...], Field(fail_fast=True, max_length=100)]
    """Largest first."""


class EarlierCompletion(Frozen):
    """A completion at an evaluation."""

    step: Count
    text: str


class Completion(Frozen):
    """A model's completion of a held-out prompt, by greedy decoding."""

    prompt: str
    expected: str
    """How the sample continues."""
    before: str | None = None
    """The completion before training; None if there is none."""
    at_evaluations: Annotated[tuple[EarlierCompletion, ...], Field(fail_fast=True, max_length=100)] = ()
    """Completions while the model was trained, at the newest evaluations, in order."""
    after: str | None = None
    """The completion by the trained model; None until it has been saved."""


class Completions(Frozen):
    """The content of a run directory's completions.json."""

    data: Annotated[tuple[Completion, ...], Field(fail_fast=True, max_length=1000)]


class Operator(Frozen):
    """A PyTorch operator in the profiled window; `own_seconds` excludes the operators that it calls."""

    name: Text
    calls: Count
    seconds: Seconds
    own_seconds: Seconds
    device_seconds: Seconds | None
    """Seconds of its kernels; None on a CPU."""


class Operators(Frozen):
    """The content of a run directory's profile/operators.json."""

    data: Annotated[tuple[Operator, ...], Field(fail_fast=True, max_length=1000)]
    """Sorted by `own_seconds`, the slowest first."""


class ReplicaOutcome(Frozen):
    """How an independent replica ended."""

    replica: Count
    steps: Count
    final_loss: Number | None
    eval_loss: Number | None
    trained_tokens: TokenTotal
    files: Annotated[tuple[Name, ...], Field(fail_fast=True, max_length=1000)]
    """Names in its model's directory."""


class Outcome(Frozen):
    """How a successful run ended."""

    files: Annotated[tuple[Name, ...], Field(fail_fast=True, max_length=1000)]
    """Names in the model's directory."""
    steps: Count
    first_loss: Number | None
    final_loss: Number | None
    trained_tokens: TokenTotal
    effective_batch_size: Count
    eval_loss: Number | None = None
    """Mean over the validation set's target tokens (or samples, with objectives other than sft), of the
    model as saved."""
    eval_token_accuracy: Number | None = None
    """The share of these tokens that are the model's most likely next token; null with a preference
    objective or reward."""
    eval_exact_match: Number | None = None
    """The share of held-out samples of which every target is the most likely next token, so that greedy
    decoding would give exactly the expected answer; null with a preference objective or reward."""
    eval_rewards: Rewards | None = None
    """What a preference objective, or reward, measured on the validation set; null with others."""
    best_step: Count | None = None
    """The step with the lowest validation loss."""
    equivalence_error: Number | None = None
    noise_scale: NoiseScale | None = None
    tuning: Tuning | None = None
    replicas: Annotated[tuple[ReplicaOutcome, ...], Field(max_length=_MOST_RANKS)] | None = None
    """How each independent replica ended; None: the devices trained one model."""


class Failure(Frozen):
    """Why a run failed; a retry after a permanent failure would fail the same way."""

    code: Code
    message: Text
    permanent: bool
