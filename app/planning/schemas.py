"""Requests and answers of the calculators."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, StringConstraints, model_validator

from app.contract.accumulation import MAX_MICRO_BATCH, Precision
from app.contract.arguments import Method, OptimizerChoice
from app.contract.base import Flag, Request, ResponseModel
from app.contract.model_reference import StartingModel
from app.contract.objective import ObjectiveName
from app.contract.plan import Alternative, Source
from app.planning.memory import Memory
from app.planning.tool_configs import Tool


class BatchSizeRequest(Request):
    """Requests the largest micro-batch that fits, and how a target batch is split, for a model or from raw
    figures."""

    model_name: StartingModel | None = None
    model_size_gb: float | None = Field(None, gt=0, le=1e6, description="Weights, GiB")
    activation_memory_per_sample_mb: float | None = Field(None, gt=0, le=1e9, description="MiB")
    available_memory_gb: float | None = Field(None, gt=0, le=1e6, description="GiB")
    target_effective_batch_size: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        validation_alias=AliasChoices(
            "target_effective_batch_size", "target_batch_size", "effective_batch_size"
        ),
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_MICRO_BATCH,
        validation_alias=AliasChoices("micro_batch_size", "batch_size"),
        description="Predict for this many samples at a time; null: the planner chooses the size",
    )
    num_gpus: int | None = Field(
        None, ge=1, le=1024, description="How many of the existing or declared GPUs to use; null: all"
    )
    gpu_ids: list[int] | None = Field(None, fail_fast=True, min_length=1, max_length=1024)
    gpus: list[Annotated[str, StringConstraints(max_length=60)]] | None = Field(
        None,
        fail_fast=True,
        min_length=1,
        max_length=1024,
        description='Declared devices: "24GB", "A100-80GB"',
    )
    max_length: int | None = Field(None, ge=2, description="Tokens; null: the model's limit, at most 1024")
    objective: ObjectiveName = Field(
        "sft",
        description="What is learned: with dpo, orpo, simpo and reward, a sample is a pair of two sequences",
    )
    method: Method = Field("full", description='"full", "lora", "qlora", or {"lora": {"r": 16, …}}')
    optimizer: OptimizerChoice = "adamw"
    mixed_precision: Flag | Precision = True
    gradient_checkpointing: Flag = False
    max_memory_usage: float = Field(0.9, gt=0, le=1)
    memory_safety_margin: float | None = Field(None, ge=0, lt=1)
    wait_seconds: float = Field(
        1.5, ge=0, le=30, description="How long to wait for a simulation before answering by formula"
    )

    @model_validator(mode="after")
    def _model_or_raw_figures(self) -> "BatchSizeRequest":
        raw = (self.model_size_gb, self.activation_memory_per_sample_mb, self.available_memory_gb)
        if self.model_name is None and any(figure is None for figure in raw):
            raise ValueError(
                "give model_name, or all of model_size_gb, activation_memory_per_sample_mb and "
                "available_memory_gb"
            )
        if self.model_name is not None and any(figure is not None for figure in raw):
            raise ValueError(
                "give either model_name, or model_size_gb, activation_memory_per_sample_mb and "
                "available_memory_gb"
            )
        if self.gpu_ids is not None and self.gpus is not None:
            raise ValueError("give gpu_ids or gpus, not both")
        if self.gpu_ids is not None and len(set(self.gpu_ids)) != len(self.gpu_ids):
            raise ValueError("gpu_ids names a GPU twice")
        named = self.gpu_ids or self.gpus
        if named is not None and self.num_gpus not in (None, len(named)):
            raise ValueError(f"num_gpus is {self.num_gpus}, but {len(named)} are named")
        if self.model_name is None and self.micro_batch_size is not None:
            raise ValueError(
                "micro_batch_size needs model_name: without a model, the micro-batch size is the result; "
                "leave it out"
            )
        if self.model_name is None:
            self._check_raw_figures()
        return self

    def _check_raw_figures(self) -> None:
        """Raw figures contain what these fields would decide.

        Raises:
            ValueError: one of them is given.
        """
        decided = ("max_length", "objective", "method", "mixed_precision", "gradient_checkpointing")
        for name in decided:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} needs model_name: without a model, the figures for weights and activations "
                    "must contain its effect; leave it out"
                )

    @property
    def raw_figures(self) -> tuple[float, float, float]:
        """Weights in GiB, activations per sample in MiB, memory in GiB; only where there is no model."""
        weights, sample, available = (
            self.model_size_gb,
            self.activation_memory_per_sample_mb,
            self.available_memory_gb,
        )
        assert weights is not None
        assert sample is not None
        assert available is not None
        return weights, sample, available


class ToolConfigRequest(BatchSizeRequest):
    """Requests a configuration of another tool, for what the calculator plans."""

    learning_rate: float | None = Field(
        None, ge=1e-12, le=100, description="null: the default of a job with this objective and method"
    )
    epochs: int = Field(3, ge=1, le=10_000)
    data: Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]+$")] = (
        Field("data.jsonl", description="The training data, as the tool will find it")
    )

    @model_validator(mode="after")
    def _names_model_and_batch(self) -> "ToolConfigRequest":
        if self.model_name is None:
            raise ValueError("model_name is missing: a configuration names its model")
        if self.target_effective_batch_size is None:
            raise ValueError(
                "target_effective_batch_size is missing: give the batch that the tool is to train"
            )
        return self


class ToolConfigResponse(ResponseModel):
    tool: Tool
    content: str = Field(description="The file; for torchtune, a command")
    file_name: str
    command: str = Field(description="What runs it")
    effective_batch_size: int = Field(description="micro_batch_size × accumulation_steps × devices")
    micro_batch_size: int
    accumulation_steps: int
    devices: int
    warnings: list[str]


class DeviceSplit(ResponseModel):
    gpu_id: int | str
    name: str
    memory_bytes: int
    memory_limit_bytes: int
    max_micro_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    micro_batch_sizes: list[int] = Field(description="Samples in each micro-batch (the first 4096 at most)")
    samples: int


class BatchSizeResponse(ResponseModel):
    model_name: str | None
    parameters: int | None
    parameters_are_estimated: bool = Field(
        description="true if no exact rule for the model's family is known and no worker has counted its "
        "parameters yet"
    )
    fits: bool
    actual_batch_size_per_gpu: int
    accumulation_steps: int
    effective_batch_size: int
    max_micro_batch_size: int
    devices: list[DeviceSplit]
    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="fsdp: a full copy of the model does not fit on each device, so they divide it; for raw "
        "figures always ddp",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None, description="What the devices divide with fsdp: optimizer states, also gradients, also weights"
    )
    memory: Memory
    source: Source
    expected_error: float | None = Field(
        description="Mean absolute relative error of this source's predictions of peak memory so far; null: "
        "not measured"
    )
    predicted_samples_per_second: float | None = Field(
        None,
        description="Full-length samples, forward and backward; null: no similar size was measured on this "
        "kind of device",
    )
    alternatives: list[Alternative]
    explanation: str
    warnings: list[str]


class PlannableModelResponse(ResponseModel):
    id: str
    object: Literal["accumulation.model"] = "accumulation.model"
    source: Literal["built_in", "local", "catalogue"]
    parameters: int
    positions: int = Field(description="The context length: the most tokens of a sequence")


class EffectiveBatchResponse(ResponseModel):
    actual_batch_size: int
    accumulation_steps: int
    num_gpus: int
    effective_batch_size: int
    explanation: str


class AccumulationStepsResponse(ResponseModel):
    target_batch_size: int
    actual_batch_size: int
    num_gpus: int
    accumulation_steps: int
    effective_batch_size: int
    exact: bool
    micro_batch_sizes: list[int] = Field(description="Micro-batches of the first device")
    devices: list[list[int]]
    explanation: str


class LearningRateResponse(ResponseModel):
    base_lr: float
    accumulation_steps: int
    num_gpus: int
    adjusted_lr: float
    scale: float
    rule: Literal["sqrt", "linear", "inverse", "none"]
    all: dict[str, float]
    warmup_steps: int
    explanation: str


class Recommendation(ResponseModel):
    value: Any
    why: str
    evidence: Literal["measured", "simulated", "formula", "literature", "requested"]
    confidence: Literal["low", "medium", "high"]
    range: list[float] | None = None


class Recommendations(ResponseModel):
    model_name: str | None
    model_size: str | None
    parameters: int
    effective_batch_size: Recommendation
    micro_batch_size: Recommendation
    accumulation_steps: Recommendation
    learning_rate: Recommendation
    warmup_steps: Recommendation
    optimizer: Recommendation
    precision: Recommendation
    gradient_checkpointing: Recommendation
    gradient_clipping: Recommendation
    submission: dict[str, Any]
    """The values above as part of a request for a job."""
    advice: list[str]
