"""What a client sends for a sweep, and what it gets."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from app.contract.base import ResponseModel, ShortText
from app.contract.states import JobStatus
from app.jobs.request_schemas import TrainingRequest
from app.jobs.response_schemas import DryRunResponse

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
SweepName = Annotated[str, StringConstraints(pattern=NAME, max_length=64)]

MAX_JOBS = 100
"""The largest number of jobs in a sweep."""


class SweepRequest(TrainingRequest):
    """A job, and the fields in which the sweep's jobs differ."""

    name: SweepName | None = Field(None, description="The sweep's name; null: generated")
    vary: dict[ShortText, Annotated[list[Any], Field(min_length=1, max_length=MAX_JOBS)]] = Field(
        min_length=1,
        max_length=6,
        description="Values by field; there is a job for each combination. Fields: learning_rate, "
        "effective_batch_size, lora_rank, or any field of the request by its path, such as "
        "training_config.weight_decay or dataset_config.max_length",
    )


class SweepJob(ResponseModel):
    """A job of a sweep."""

    training_id: str
    status: JobStatus
    values: dict[str, Any]
    """The job's values of the fields that vary."""
    step: int
    steps_total: int | None
    loss: float | None
    """The mean training loss of the last samples, equally many for all jobs; of a job that has seen fewer,
    the moving average."""
    validation_loss: float | None
    """That of the saved model; null until the job has succeeded, and without validation data."""


class SweepResponse(ResponseModel):
    """A sweep: its jobs in the order of their creation, and which of them is the best so far."""

    object: Literal["sweep"] = "sweep"
    name: str
    created_at: int
    vary: list[str]
    """The fields that vary."""
    jobs: list[SweepJob]
    best: str | None
    """The id of the succeeded job with the lowest loss; null if no job can be named, or none has succeeded
    yet."""
    decided_by: Literal["validation_loss", "loss"] | None
    """The loss that decides: the validation loss, or the training loss if no job has validation data."""
    why_no_best: str | None
    """Why no job can be the best, whatever their losses; null if one can."""


class SweepSummary(ResponseModel):
    """A sweep in a list."""

    name: str
    created_at: int
    jobs: int


class SweepList(ResponseModel):
    """The newest sweeps, newest first."""

    object: Literal["list"] = "list"
    data: list[SweepSummary]


class PlannedJob(ResponseModel):
    """What a job of a sweep would do."""

    values: dict[str, Any]
    plan: DryRunResponse


class SweepPlan(ResponseModel):
    """What a sweep would do (dry_run); nothing is stored."""

    object: Literal["sweep.plan"] = "sweep.plan"
    jobs: list[PlannedJob]
