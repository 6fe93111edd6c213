"""A job's metrics, profile, completions and comparison on the wire."""

from typing import Any

from app.contract.base import ResponseModel
from app.contract.reports import Completion, Operator, Rewards
from app.statistics.schemas import Statistics


class ComparedJob(ResponseModel):
    training_id: str
    model_name: str
    effective_batch_size: int
    accumulation_steps: int
    steps: int
    final_loss: float
    loss_noise: float
    """Variance of the window losses around their trend."""
    noise_ratio: float | None
    """The job's loss noise divided by the first job's; null if the first job's is 0."""
    stats: Statistics


class Comparison(ResponseModel):
    """Jobs side by side, in the order of the request."""

    samples_seen: list[float]
    """The sample counts at which the series are compared, evenly spread over the range that all jobs
    share."""
    loss: dict[str, list[float]]
    """The mean loss of the last `averaged_samples` samples at each of `samples_seen`, by training id."""
    averaged_samples: int
    why_not_comparable: str | None
    """Why the losses do not measure the same; null if they do."""
    jobs: list[ComparedJob]


class Evaluation(ResponseModel):
    step: int
    loss: float | None
    """Loss on the validation data; null if it was not finite, or not computed (at step 0, only
    metrics are)."""
    token_accuracy: float | None
    """Share of the validation data's target tokens that the model predicts; null with a preference
    objective or reward, and for jobs of versions that did not measure it."""
    exact_match: float | None = None
    """Share of the validation data's samples of which the model predicts every target token, so that greedy
    decoding gives exactly the expected answer; null with a preference objective or reward."""
    rewards: Rewards | None = None
    """What a preference objective, or reward, measured on the validation data."""
    metrics: dict[str, float] | None = None
    """Metrics of the service's own programs, by name; also at step 0, before training."""


class Metrics(ResponseModel):
    training_id: str
    steps: int
    data: list[dict[str, Any]]
    evaluations: list[Evaluation]


class Profile(ResponseModel):
    training_id: str
    operators: list[Operator]
    """PyTorch operators by the time that they took themselves, the slowest first."""
    files: list[str]
    """Available below this address: `trace.json` is for Perfetto or chrome://tracing, `memory.pickle` for
    pytorch.org/memory_viz."""


class CompletionsResponse(ResponseModel):
    training_id: str
    data: list[Completion]
