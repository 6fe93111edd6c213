"""What a trainer reports through its run directory: lines of its log, events, its end."""

from collections.abc import Iterable
from typing import Any, Literal

from app.contract.base import Frozen

Level = Literal["info", "warning", "error"]


class NoiseScale(Frozen):
    """The gradient noise scale in samples: the trace of the gradient's covariance over its squared norm
    (McCandlish et al. 2018, section 2.2)."""

    value: float
    low: float
    """The lower end of the 90 % confidence interval."""
    high: float | None
    """The upper end; None: unbounded, since the gradient's own norm cannot be distinguished from zero yet."""
    measurements: int


class LogLine(Frozen):
    """One optimizer step. Counters (`step`, `micro_step`, `skipped`) run over the whole job;
    `samples`, `tokens`, `loss` and times are those of this step's window."""

    attempt: int
    step: int
    """Weight updates so far."""
    micro_step: int
    """Micro-batches so far."""
    batch_idx: int
    """Index of the window in its epoch."""
    epoch: int
    samples: int
    loss: float
    """Sum of token losses over the window, divided by its target tokens."""
    loss_ema: float
    gradient_accumulation_steps: int
    effective_batch_size: int
    physical_batch_size: int
    """Samples of the largest micro-batch."""
    learning_rate: float
    grad_norm: float
    """Global norm of the window's gradient before clipping (`each_micro_batch`: before the last clip)."""
    tokens: int
    """Target tokens: those that the loss is averaged over."""
    input_tokens: int
    """Tokens of the samples, prompts included, padding not."""
    padded_tokens: int
    """Rows × longest row, summed over the micro-batches: what the device worked on."""
    tokens_per_second: float
    memory_gb: float | None
    """Memory in use at the end of the window, GiB: the process's on CPU, allocated on a GPU."""
    peak_gb: float | None
    noise_scale: float | None
    skipped: int
    time: float
    """Unix seconds."""
    data_seconds: float
    forward_backward_seconds: float
    optimizer_seconds: float
    synchronise_seconds: float | None = None
    """Reading the window's sums back from the device, and with several devices adding them up."""
    temperature_celsius: float | None = None
    """The GPU's temperature when the worker read this line."""
    aux_loss: float | None = None
    """A mixture of experts' balance loss, weighted as trained."""
    micro_losses: tuple[float, ...] | None = None
    """The mean loss of each micro-batch, on request."""
    largest_tokens: int | None = None
    """Tokens of the largest micro-batch, padding included."""
    gradient_norms: dict[str, float] | None = None
    """The gradient's norm by layer, before clipping, on request."""


class WindowProgress(Frozen):
    """How far the current window is: the content of progress.json."""

    attempt: int
    step: int
    """Weight updates made before it."""
    micro_step: int
    """Micro-batches so far, over the whole job."""
    accumulation_step: int
    """Micro-batches of this window so far."""


class EventLine(Frozen):
    attempt: int
    time: float
    type: str
    level: Level
    message: str
    data: dict[str, Any]


AS_FAST = 0.97
"""A micro-batch this close to the fastest counts as fast as it: the leanest of those is taken."""


def smallest_of_the_fastest(measured: Iterable[tuple[int, float]]) -> int:
    """The smallest number of tokens whose rate is within 3 % of the best, from (tokens, rate) pairs."""
    pairs = list(measured)
    best = max(rate for _, rate in pairs)
    return min(tokens for tokens, rate in pairs if rate >= AS_FAST * best)


class MeasuredSize(Frozen):
    """A micro-batch's size, measured on the job's own data and device."""

    token_budget: int
    micro_batches: int
    """The number of micro-batches of the measured samples."""
    largest_tokens: int
    """The tokens of the largest micro-batch, padding included."""
    samples_per_second: float
    """Forward and backward, without the optimizer."""
    tokens_per_second: float
    """The samples' own tokens, padding not counted."""
    peak_bytes: int
    """Allocated on a GPU, the process's on a CPU; with the optimizer's states there."""


class Tuning(Frozen):
    """A sweep over micro-batches: the leanest of those that are as fast as the fastest is chosen."""

    token_budget: int
    """The one chosen."""
    samples: int
    """Samples that each was measured on."""
    tried: tuple[MeasuredSize, ...]
    """Largest first."""


class Completion(Frozen):
    """How a model completes a held-out prompt, always with the likeliest token."""

    prompt: str
    expected: str
    """How the sample continues."""
    before: str | None = None
    """The completion by the base model; None if there is none."""
    after: str | None = None
    """The completion by the trained model; None until it has been saved."""


class Completions(Frozen):
    """The content of a run directory's completions.json."""

    data: tuple[Completion, ...]


class Operator(Frozen):
    """One of PyTorch's operators in the window that was profiled. Seconds; `own` without what it calls."""

    name: str
    calls: int
    seconds: float
    own_seconds: float
    device_seconds: float | None
    """Seconds of its kernels; None on a CPU."""


class Operators(Frozen):
    """The content of a run directory's profile/operators.json."""

    data: tuple[Operator, ...]
    """The operators that took longest by themselves, the slowest first."""


class Outcome(Frozen):
    """How a successful run ended."""

    files: tuple[str, ...]
    """Names in the model's directory."""
    steps: int
    first_loss: float | None
    final_loss: float | None
    trained_tokens: int
    effective_batch_size: int
    eval_loss: float | None = None
    """Mean over the validation set's target tokens, of the model as saved."""
    best_step: int | None = None
    """The step with the lowest validation loss."""
    equivalence_error: float | None = None
    noise_scale: NoiseScale | None = None
    tuning: Tuning | None = None


class Failure(Frozen):
    """Why a run ended without success; a permanent one would end the same way again."""

    code: str
    message: str
    permanent: bool
