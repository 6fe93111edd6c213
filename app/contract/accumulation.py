"""The accumulation configuration: how a request describes an effective batch."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from app.contract.base import Flag, Request, ResponseModel

MAX_ACCUMULATION_STEPS = 4096
MAX_EFFECTIVE_BATCH = 1_000_000
MAX_MICRO_BATCH = 100_000
Precision = Literal["bf16", "fp16", "no", "tf32", "pure_bf16"]
"""bf16, fp16: autocast over fp32 weights; pure_bf16: weights in bf16 too; no: fp32; tf32: fp32, on tensor
cores with TF32's mantissa."""

ClipMode = Literal["after_accumulation", "each_micro_batch", "value"]
LearningRateRule = Literal["sqrt", "linear", "none"]


class AccumulationConfig(Request):
    """Every field has a default. Accumulation steps and batch sizes that are null follow from the others, or
    are planned."""

    use_gradient_accumulation: Flag = Field(True, description="false: every micro-batch is a step")
    accumulation_steps: int | None = Field(
        None,
        ge=1,
        le=MAX_ACCUMULATION_STEPS,
        validation_alias=AliasChoices(
            "accumulation_steps", "gradient_accumulation_steps", "grad_accum_steps"
        ),
        description="Micro-batches per step and device; null: as planned. Without "
        "target_effective_batch_size, the effective batch is accumulation_steps x micro_batch_size (8 if not "
        "given) x devices",
    )
    target_effective_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_EFFECTIVE_BATCH,
        validation_alias=AliasChoices(
            "target_effective_batch_size", "target_batch_size", "effective_batch_size"
        ),
        description="Samples per optimizer step over all devices",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_MICRO_BATCH,
        validation_alias=AliasChoices("micro_batch_size", "batch_size"),
        description="Samples per forward pass and device. (In the hyperparameters of OpenAI's requests, "
        "batch_size is the effective batch instead.)",
    )
    max_memory_usage: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Largest share of a device's memory to plan for; memory_safety_margin may lower it",
    )
    memory_safety_margin: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of memory kept free; the stricter of this and max_memory_usage applies. null: 0.1 "
        "until the prediction errors of five jobs have been measured, then derived from these errors",
    )
    auto_adjust_batch_size: Flag = Field(
        True, description="Reduce the micro-batch if it would not fit; the effective batch is unchanged"
    )
    sync_gradients: Flag = Field(
        True,
        description="Gradients are synchronised once per step; false only with parallel_independent, where "
        "each device trains a model of its own",
    )
    gradient_scaling: Flag = Field(
        True,
        description="Scale learning_rate from base_batch_size to the effective batch, by the rule in "
        "lr_scaling; no effect without base_batch_size. It has nothing to do with fp16's loss scale",
    )
    lr_scaling: LearningRateRule = Field(
        "sqrt",
        description="How learning_rate grows with the batch, from base_batch_size: with its square root, in "
        "proportion (linear), or not at all (none)",
    )
    base_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_EFFECTIVE_BATCH,
        description="The batch that the learning rate was chosen for; null: no scaling",
    )
    mixed_precision: Flag | Precision = Field(
        True,
        validation_alias=AliasChoices("mixed_precision", "use_mixed_precision"),
        description="true: bf16 if the device supports it, else fp16, and fp32 on a CPU; false or no: "
        "fp32; bf16 or fp16: compute in 16 bits, with weights in fp32; pure_bf16: keep weights in bf16, too; "
        "tf32: fp32 with TF32 matrix products",
    )
    gradient_clipping: float | None = Field(
        1.0,
        gt=0,
        le=1e30,
        description="Limit on the norm of the whole batch's gradient or, with clip_mode value, on the "
        "absolute value of each element; null: off",
    )
    clip_mode: ClipMode = Field(
        "after_accumulation",
        description="after_accumulation: limit the norm of the step's whole gradient; each_micro_batch: "
        "limit that of the running sum after each micro-batch; value: limit each element of the whole "
        "gradient",
    )
    clip_gradients_before_accumulation: Flag = Field(
        False, description="true is the same as clip_mode each_micro_batch"
    )
    loss_spike_zscore: float | None = Field(
        None,
        gt=0,
        description=(
            "Skip a step whose loss is this many standard deviations above the mean of recent losses"
        ),
    )
    accumulate_in_fp32: Flag = Field(
        True,
        description="pure_bf16: sum gradients in fp32, 4 bytes a parameter instead of 2; false: in bf16",
    )
    accumulate_gradients_on_cpu: Flag = Field(
        False, description="Keep gradients in host memory between micro-batches"
    )
    use_cpu_offload: Flag = Field(
        False,
        description="Keep the optimizer's states in host memory and run its step on the CPU: less GPU "
        "memory, slower steps",
    )
    accumulation_scheduler: Literal["constant", "linear", "noise_scale", "loss_variance"] = Field(
        "constant",
        description="How the effective batch changes during training: not at all (constant); up to the "
        "requested one over accumulation_warmup_steps (linear); or larger than it, as the measured noise of "
        "the gradients (noise_scale) or of the losses (loss_variance) suggests",
    )
    accumulation_warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        validation_alias=AliasChoices("accumulation_warmup_steps", "warmup_steps"),
        description="Optimizer steps over which the linear scheduler raises the effective batch",
    )
    max_effective_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_EFFECTIVE_BATCH,
        description="The largest effective batch to which accumulation_scheduler noise_scale or "
        "loss_variance may grow; null: eight times the effective batch",
    )
    loss_variance_threshold: float = Field(
        0.01, gt=0, description="Variance of recent losses above which loss_variance doubles the batch"
    )
    equivalence_check: Flag = Field(
        True,
        description="Gradient check: before training, compare the first step's gradient in two splits",
    )
    noise_scale_every: int | None = Field(
        10, ge=1, description="Measure the gradient noise scale once every this many steps; null: never"
    )
    log_accumulation: Flag = Field(
        True, description="Report progress within a step: after a micro-batch, at most once a second"
    )
    log_memory_usage: Flag = Field(True, description="The memory in use at the end of each step, in the log")
    log_micro_losses: Flag = Field(False, description="The loss of each micro-batch, in the log")
    log_gradients: Flag = Field(False, description="The gradient norm of each layer, in the log")

    @model_validator(mode="after")
    def _gradients_are_synchronised(self) -> "AccumulationConfig":
        if not self.sync_gradients and not getattr(self, "parallel_independent", False):
            raise ValueError(
                "sync_gradients cannot be false: each device would then apply its own gradient instead of "
                "the effective batch's. Leave it out, since gradients are reduced only once per window "
                "anyway, "
                "or set parallel_independent to train a model on each device"
            )
        return self

    @model_validator(mode="after")
    def _old_name_of_the_clip_mode(self) -> "AccumulationConfig":
        if not self.clip_gradients_before_accumulation or self.clip_mode == "each_micro_batch":
            return self
        if "clip_mode" in self.model_fields_set:
            raise ValueError(
                f"clip_gradients_before_accumulation contradicts clip_mode {self.clip_mode}: leave one out"
            )
        vars(self)["clip_mode"] = "each_micro_batch"  # it still counts as not given
        return self

    @model_validator(mode="after")
    def _ramps_agree(self) -> "AccumulationConfig":
        if self.accumulation_scheduler == "linear" and not self.accumulation_warmup_steps:
            raise ValueError("accumulation_scheduler linear needs accumulation_warmup_steps")
        if self.accumulation_warmup_steps and self.accumulation_scheduler != "linear":
            raise ValueError(
                "accumulation_warmup_steps (alias: warmup_steps) needs accumulation_scheduler linear; "
                "to warm up the learning rate, set training_config.warmup_steps"
            )
        if self.accumulation_scheduler == "noise_scale" and self.noise_scale_every is None:
            raise ValueError("accumulation_scheduler noise_scale needs noise_scale_every")
        if self.accumulation_scheduler == "noise_scale" and self.clip_mode == "each_micro_batch":
            raise ValueError(
                "the noise scale is not measured under clip_mode each_micro_batch: choose another "
                "clip_mode, or "
                "another accumulation_scheduler"
            )
        return self


def overridden(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored configuration, with those that are given instead. Stored fields that only make
    sense together with a field that is replaced are dropped: the steps of a linear ramp, for example."""
    replaced: set[str] = set()
    if {"clip_mode", "clip_gradients_before_accumulation"} & given.keys():
        replaced |= {"clip_mode", "clip_gradients_before_accumulation"}
    if given.get("accumulation_scheduler", "linear") != "linear":
        replaced.add("accumulation_warmup_steps")
    return {**{name: value for name, value in stored.items() if name not in replaced}, **given}


class ConfigurationRequest(AccumulationConfig):
    """A configuration on its own, with the number of devices that it is meant for."""

    num_gpus: int = Field(1, ge=1, le=1024)


class ConfigurationResponse(ResponseModel):
    config_id: str
    object: Literal["accumulation.config"] = "accumulation.config"
    created_at: int
    config: AccumulationConfig
    num_gpus: int
    effective_batch_size: int | None = Field(
        description="null where neither a target, nor steps, nor a micro-batch was given"
    )
    warnings: list[str]
