"""What a client receives about a job."""

from typing import Any, Literal

from pydantic import Field

from app.contract.base import ResponseModel
from app.contract.data_formats import DataFormat
from app.contract.plan import Plan
from app.contract.reports import NoiseScale, Rewards, Tuning
from app.contract.spec import (
    Overlength,
    Tune,
)
from app.contract.states import JobStatus, RequestedAction
from app.statistics.schemas import RankFigures


class ErrorResponse(ResponseModel):
    code: str
    message: str


class DatasetResponse(ResponseModel):
    file_id: str
    format: DataFormat
    examples: int
    max_length: int
    overlength: Overlength


class AccumulationStatus(ResponseModel):
    enabled: bool
    steps: int
    effective_batch_size: int
    sync_gradients: bool
    clip_before_accumulation: bool
    accumulate_on_cpu: bool
    accumulation_step: int


class Progress(ResponseModel):
    step: int = 0
    """Optimizer steps made."""
    steps_total: int | None = None
    micro_step: int = 0
    """Micro-batches done since the job began."""
    accumulation_step: int = 0
    """Micro-batches done of the current step while `within_window` is true; otherwise, those of the previous
    step."""
    within_window: bool = False
    """Whether a step is under way that has taken a second or longer."""
    skipped: int = 0
    """Steps that changed nothing: their loss or gradient was not finite, a spike, or had no target tokens."""
    epoch: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    """Target tokens, which count toward the loss."""
    loss: float | None = None
    loss_ema: float | None = None
    """The loss averaged over steps, the newest with a weight of a tenth."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    """Norm of the step's gradient before clipping."""
    tokens_per_second: float | None = None
    """Input tokens of the samples, prompts included, without padding."""
    memory_peak_bytes: int | None = None
    eta_seconds: float | None = None
    prepared_samples: int | None = None
    """Samples that are tokenised so far or, after that, scored by the reference model; null once training has
    begun."""
    samples_to_prepare: int | None = None
    ranks: list[RankFigures] | None = None
    """What each of several devices has done; null with one device."""


class ReplicaResponse(ResponseModel):
    """The result of an independent replica."""

    replica: int
    steps: int
    final_loss: float | None
    eval_loss: float | None
    trained_tokens: int
    model: str | None
    """Where its model can be downloaded; None if it was deleted."""


class ResultResponse(ResponseModel):
    model_path: str | None = Field(
        description="Relative to the service's data folder; null: deleted, or the job only measured"
    )
    files: list[str] = Field(description="The model's files; empty if it was deleted")
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None = None
    eval_exact_match: float | None = Field(
        None,
        description="Share of the validation data's samples of which the model predicts every target token: "
        "greedy decoding gives exactly the expected answer",
    )
    eval_rewards: Rewards | None = Field(
        None, description="What a preference objective, or reward, measured on the validation data"
    )
    eval_token_accuracy: float | None = Field(
        None, description="Share of the validation data's target tokens that the model predicts"
    )
    best_step: int | None = None
    trained_tokens: int
    equivalence_error: float | None = None
    noise_scale: NoiseScale | None = None
    tuning: Tuning | None = None
    effective_batch_size: int
    replicas: list[ReplicaResponse] | None = None
    """The results of independent replicas; null: the devices trained one model."""


Reason = Literal["no_worker", "no_matching_worker", "no_free_gpu", "retry_delay", "quota_used_up", "starting"]


class Waiting(ResponseModel):
    reason: Reason
    queue_position: int
    predicted_start: int | None


class Links(ResponseModel):
    self: str
    metrics: str
    log: str
    events: str
    stats: str
    model: str | None
    profile: str | None


class JobResponse(ResponseModel):
    """The current state of a job."""

    id: str
    training_id: str
    object: Literal["accumulation.training"] = "accumulation.training"
    status: JobStatus
    requested: RequestedAction | None = Field(
        description="A requested action that the worker has not finished yet"
    )
    created_at: int
    started_at: int | None
    finished_at: int | None
    model_name: str
    user_id: int | str | None
    metadata: dict[str, str]
    requirements: dict[str, str] = Field(description="Labels that the job's worker must have")
    priority: int
    attempt: int
    config: dict[str, Any]
    training_config: dict[str, Any]
    dataset: DatasetResponse
    device: str | None
    accumulation_status: AccumulationStatus
    plan: Plan
    progress: Progress
    result: ResultResponse | None
    error: ErrorResponse | None
    waiting: Waiting | None
    tune: Tune | None = Field(
        None,
        description="while_training: other sizes are tried during the job's own steps; first: they are "
        "measured after two steps; only: they are measured, and no model is trained; null: the planned size "
        "is used",
    )
    links: Links
    learning_rate: float = Field(description="The peak, scaled where base_batch_size was given")
    effective_batch_size: int
    accumulation_steps: int
    actual_batch_size_per_gpu: int


class DryRunResponse(ResponseModel):
    """What a job would do: nothing was queued or stored."""

    object: Literal["accumulation.dry_run"] = "accumulation.dry_run"
    model_name: str
    config: dict[str, Any]
    training_config: dict[str, Any]
    dataset: DatasetResponse
    plan: Plan
    learning_rate: float = Field(description="The peak, scaled where base_batch_size was given")
    effective_batch_size: int
    accumulation_steps: int
    actual_batch_size_per_gpu: int
    predicted_tokens: int | None = Field(
        None,
        description="Tokens in all samples of the run: from the lengths that an earlier job counted or a "
        "worker measured, or else estimated from bytes",
    )
    predicted_duration_seconds: float | None = Field(
        None, description="From the claim to the end; null: nothing is known of this kind of device yet"
    )
    predicted_duration_range: tuple[float, float] | None = Field(
        None, description="Range, in seconds, that contains the actual duration about nine times out of ten"
    )
    gpu_hours: float | None = Field(
        None, description="On GPUs: the duration times the number of devices, in hours"
    )
    gpu_cost: float | None = Field(None, description="Cost of gpu_hours, if ACCRUE_GPU_HOUR_COST is set")
    measured_by: str | None = Field(
        None, description="The finished job whose speed the predicted duration is based on"
    )


class EventResponse(ResponseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warning", "error"]
    type: str
    message: str
    data: dict[str, Any]
