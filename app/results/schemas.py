"""A job's metrics, profile, completions and comparison on the wire."""

from typing import Any

from app.contract.base import Answer
from app.contract.reports import Completion, Operator
from app.statistics.schemas import Statistics


class ComparedJob(Answer):
    training_id: str
    model_name: str
    effective_batch_size: int
    accumulation_steps: int
    steps: int
    final_loss: float
    loss_noise: float
    """Variance of the window losses around their trend."""
    noise_ratio: float | None
    """Over that of the first job named; None: the first has none."""
    stats: Statistics


class Comparison(Answer):
    """Jobs side by side; in the order in which they were named."""

    samples_seen: list[float]
    """Where the series are compared: evenly spread over what all of them have seen."""
    loss: dict[str, list[float]]
    """The smoothed loss at each of `samples_seen`, by training id."""
    jobs: list[ComparedJob]


class Evaluation(Answer):
    step: int
    loss: float | None
    """On the validation data; None: it was no number."""


class Metrics(Answer):
    training_id: str
    steps: int
    data: list[dict[str, Any]]
    evaluations: list[Evaluation]


class Profile(Answer):
    training_id: str
    operators: list[Operator]
    """The operators that took longest by themselves, the slowest first."""
    files: list[str]
    """To be had below this address: `trace.json` is for Perfetto or chrome://tracing, `memory.pickle` for
    pytorch.org/memory_viz."""


class CompletionsAnswer(Answer):
    training_id: str
    data: list[Completion]
