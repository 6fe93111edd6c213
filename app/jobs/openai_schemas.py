"""Fine-tuning jobs and models in OpenAI's shape, as its clients send and expect them.

Source: https://platform.openai.com/docs/api-reference/fine-tuning, and the types of openai 3.52.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from app.contract.base import Request, ResponseModel
from app.contract.model_reference import StartingModel
from app.contract.objective import OtherObjectiveName
from app.datasets.dataset_config import DatasetOptions, FileId
from app.jobs.request_schemas import JobOptions, Metadata
from app.jobs.training_config import TrainingConfig

Auto = Literal["auto"]
OpenAIStatus = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]

Suffix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


def _no_integrations(given: list[Any] | None) -> list[Any] | None:
    if given:
        raise ValueError(
            "not supported: to write a job's figures for Weights & Biases, TensorBoard or MLflow, set "
            "training_config.report_to"
        )
    return given


class Hyperparameters(Request):
    """`"auto"`: 3 epochs, the recommended batch and, for supervised jobs, the recommended learning rate;
    others take the default rate of their objective."""

    n_epochs: Annotated[int, Field(ge=1, le=10_000)] | Auto = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = Field(
        "auto", description="The effective batch: samples per optimizer step"
    )
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=10_000)] | Auto = Field(
        "auto",
        description="Multiplies training_config.learning_rate, or if that is not given, 5e-5; with "
        "objectives other than sft, their default rate (dpo: 1e-6, or 1e-5 for adapters)",
    )


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[float, Field(gt=0, le=1000)] | Auto = Field(
        "auto", description="How strongly differences of log-probabilities count; auto: 0.1"
    )


class Supervised(Request):
    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)


class Dpo(Request):
    hyperparameters: DpoHyperparameters = Field(default_factory=DpoHyperparameters)


class FineTuningMethod(Request):
    """Other objectives are requested by `training_config.objective`."""

    type: Literal["supervised", "dpo"]
    supervised: Supervised = Field(default_factory=Supervised)
    dpo: Dpo = Field(default_factory=Dpo)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the chosen type."""
        return self.dpo.hyperparameters if self.type == "dpo" else self.supervised.hyperparameters


class FineTuningRequest(Request):
    """A request for a job as OpenAI's clients send it; all other options go through `extra_body`."""

    model: StartingModel
    training_file: FileId
    validation_file: FileId | None = None
    method: FineTuningMethod | None = None
    hyperparameters: Hyperparameters | None = Field(
        None, description="Deprecated: use method.supervised.hyperparameters, or method.dpo.hyperparameters"
    )
    seed: int | None = Field(None, ge=0, lt=2**31)
    suffix: Suffix | None = Field(None, description="Becomes part of the trained model's name")
    metadata: Metadata | None = None
    integrations: Annotated[list[Any] | None, AfterValidator(_no_integrations)] = Field(
        None, description="Not supported: use training_config.report_to"
    )
    accumulation: JobOptions = Field(default_factory=JobOptions)
    training_config: TrainingConfig = Field(default_factory=TrainingConfig)
    dataset_config: DatasetOptions = Field(default_factory=DatasetOptions)


class HyperparametersResponse(ResponseModel):
    """The hyperparameters after "auto" has been resolved."""

    n_epochs: int | Auto = Field(description='"auto" if the job\'s length is given in steps')
    batch_size: int
    learning_rate_multiplier: float


class DpoHyperparametersResponse(HyperparametersResponse):
    beta: float


class SupervisedResponse(ResponseModel):
    hyperparameters: HyperparametersResponse


class DpoResponse(ResponseModel):
    hyperparameters: DpoHyperparametersResponse


class MethodResponse(ResponseModel):
    type: Literal["supervised"] | OtherObjectiveName = "supervised"
    supervised: SupervisedResponse | None = None
    dpo: DpoResponse | None = None


class FineTuningError(ResponseModel):
    code: str
    message: str
    param: str | None = None


class FineTuningJob(ResponseModel):
    """A job in OpenAI's shape; `GET /gradient-accumulation/training/{id}` returns all fields."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str = "accrue"
    status: OpenAIStatus
    training_file: str
    validation_file: str | None
    result_files: list[str]
    hyperparameters: HyperparametersResponse
    method: MethodResponse
    seed: int
    trained_tokens: int | None
    estimated_finish: int | None
    error: FineTuningError | None
    metadata: dict[str, str]
    integrations: list[Any] = Field(default_factory=list)


class FineTuningEvent(ResponseModel):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any]


class CheckpointMetrics(ResponseModel):
    step: int
    train_loss: float | None
    full_valid_loss: float | None
    full_valid_mean_token_accuracy: float | None


class FineTuningCheckpoint(ResponseModel):
    """A checkpoint that still exists and from which the job could continue."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics


class ModelResponse(ResponseModel):
    """A base model, or one that a job has trained."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = Field(None, description="Of a trained model: the model that it was trained from")
    job: str | None = Field(None, description="Of a trained model: the job that made it")


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelResponse]


class ModelDeleted(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
