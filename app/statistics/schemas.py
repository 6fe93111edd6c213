"""Statistics and performance on the wire."""

from typing import Any, Literal

from pydantic import Field, computed_field

from app.contract.base import ResponseModel
from app.contract.states import JobStatus


class RankFigures(ResponseModel):
    """What one of several ranks has done since the start of a job."""

    rank: int
    micro_batches: int = Field(validation_alias="total_micro_batches")
    tokens: int = Field(validation_alias="total_tokens")
    """Tokens of its samples, without padding."""
    seconds: float = Field(validation_alias="total_seconds")
    """Seconds in which its device worked on them."""
    idle_seconds: float = Field(validation_alias="total_idle_seconds")
    """Seconds in which it waited for slower ranks."""
    peak_gb: float | None
    """Its maximum memory in GiB since the attempt began."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def idle_share(self) -> float | None:
        """The share of time that it spent waiting."""
        together = self.seconds + self.idle_seconds
        return self.idle_seconds / together if together else None


class Statistics(ResponseModel):
    """Figures measured by the trainer; null where nothing was measured."""

    accumulation_steps: float | None
    """Measured micro-batches per step on the device that has most; the planned number until the first
    step."""
    effective_batch_size: int | None
    steps: int
    micro_steps: int
    skipped: int
    samples: int
    tokens: int
    """Target tokens, which count toward the loss."""
    total_loss: float | None
    first_loss: float | None
    final_loss: float | None
    loss_mean: float | None
    loss_variance: float | None
    avg_gradient_norm: float | None
    avg_memory_usage_gb: float | None
    peak_memory_gb: float | None
    avg_accumulation_time: float | None
    """Seconds of a step's forward and backward passes."""
    tokens_per_second: float | None
    """Tokens of the samples, prompts included, per second; `tokens` are those that the loss counts."""
    samples_per_second: float | None
    padding_share: float | None
    """1 - (tokens of the samples / padded tokens)."""
    noise_scale: float | None
    oom_recoveries: int
    prediction_error: float | None
    """(predicted - measured) / measured peak memory: positive if less memory was needed than predicted."""
    ranks: list[RankFigures] | None = None
    """One job's figures by rank; null with one device."""


class JobStatistics(ResponseModel):
    training_id: str
    status: JobStatus
    stats: Statistics


class ConfigurationStatistics(ResponseModel):
    config_id: str
    status: Literal["unused", "active", "ended"]
    stats: Statistics
    jobs: list[JobStatistics]


GroupWord = Literal["day", "user", "model", "device"]
"""What jobs can be grouped by."""


class SummedFigures(ResponseModel):
    """What jobs have done together."""

    jobs: int
    by_status: dict[str, int]
    steps: int
    samples: int
    tokens: int
    """Target tokens: those that the loss is averaged over."""
    skipped: int
    final_loss: float | None
    """Mean of the jobs' last losses."""
    target_tokens_per_second: float | None
    """Tokens that the loss is averaged over, per second of all windows."""
    samples_per_second: float | None
    device_hours: float
    """Hours of each attempt times its devices; of a running job, only the earlier attempts count."""


class GroupTotals(SummedFigures):
    """Totals of the jobs of one day, user, model or device."""

    group: str | None
    """The day of submission in UTC (2026-11-28), the `user_id`, the model's name or the device's; null for
    jobs without a `user_id`, or that no device has run yet."""
    success_rate: float | None
    """Succeeded jobs as a share of succeeded and failed ones."""


class Totals(SummedFigures):
    """Totals of all jobs, or of those that the filters select."""

    by_model: dict[str, int]
    by_user: dict[str, int]
    by_day: dict[str, int]
    configurations: int
    files: int
    groups: list[GroupTotals] | None = None
    """With `group_by`: days in order of time, other groups with the most device hours first."""


class CostByAccumulationSteps(ResponseModel):
    """Measured windows with the same number of micro-batches. Times are means of wall time."""

    accumulation_steps: int
    windows: int
    seconds_per_window: float
    seconds_per_micro_batch: float
    """Seconds of forward and backward."""
    padded_tokens_per_second: float | None
    """Padded tokens per second of forward and backward."""
    optimizer_share: float
    """The optimizer's share of a window's time."""


class JobPerformance(ResponseModel):
    training_id: str
    status: JobStatus
    tokens_per_second: float | None
    samples_per_second: float | None
    seconds: dict[str, float]
    share: dict[str, float]
    padding_share: float | None
    by_accumulation_steps: list[CostByAccumulationSteps]
    accumulation_overhead: float | None
    """How much longer a token takes in windows of several micro-batches than in windows of one micro-batch of
    the same size, as a share; null unless both were measured."""


class Latency(ResponseModel):
    requests: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class PerformanceMetrics(ResponseModel):
    gpus: list[dict[str, Any]]
    jobs: list[JobPerformance]
    api_latency: Latency
