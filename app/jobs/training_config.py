"""How a model is trained: schedule, optimizer, method, evaluation."""

from typing import Annotated, Any

from pydantic import AliasChoices, Field, StringConstraints, model_validator

from app.contract.arguments import (
    OPTIMIZER_ARGUMENTS,
    SCHEDULE_ARGUMENTS,
    Method,
    ObjectiveArguments,
    OptimizerArguments,
    OptimizerChoice,
    ScheduleArguments,
    reject_unknown_arguments,
)
from app.contract.base import Flag, Request, ShortText
from app.contract.objective import OBJECTIVE_ARGUMENTS, ObjectiveName
from app.contract.spec import (
    Attention,
    AuxScope,
    EarlyStopping,
    Kernels,
    ScheduleName,
    Tracker,
    WarmupShape,
)
from app.planning.learning_rate import DEFAULT_LEARNING_RATE, LORA_LEARNING_RATE

LEAST_LEARNING_RATE, MOST_LEARNING_RATE = 1e-12, 100.0


class TrainingConfig(Request):
    epochs: int | None = Field(None, ge=1, le=10_000, description="Default 3, where max_steps is not given")
    max_steps: int | None = Field(
        None, ge=1, le=100_000_000, validation_alias=AliasChoices("max_steps", "steps")
    )
    objective: ObjectiveName | None = Field(
        None,
        description="sft: supervised fine-tuning; dpo, orpo, simpo: from pairs of a chosen and a rejected "
        "answer; kto: from answers that are desirable or not; classification: which label a text has; "
        "reward: a score for each answer, from such pairs. null: sft, or dpo for a file of pairs, kto for a "
        "file of labelled answers, classification for a file of labelled texts",
    )
    objective_args: ObjectiveArguments = Field(default_factory=ObjectiveArguments)
    learning_rate: float = Field(
        DEFAULT_LEARNING_RATE,
        ge=LEAST_LEARNING_RATE,
        le=MOST_LEARNING_RATE,
        description="Peak learning rate. Default with full: 5e-5 (sft, classification), 1e-6 (dpo, orpo, "
        "simpo, kto) or 1e-5 (reward); with lora and qlora, in the same order: 2e-4, 1e-5 or 1e-4",
    )
    weight_decay: float = Field(0.0, ge=0, le=1)
    optimizer: OptimizerChoice = "adamw"
    optimizer_args: OptimizerArguments = Field(default_factory=OptimizerArguments)
    lr_scheduler: ScheduleName = Field("linear", description="How the learning rate changes after the warmup")
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps over which the learning rate rises to its peak"
    )
    warmup_ratio: float | None = Field(
        None, ge=0, le=1, description="The same as a share of all steps, instead of warmup_steps"
    )
    warmup_shape: WarmupShape = Field("linear", description="The curve on which the learning rate rises")
    lr_scheduler_args: ScheduleArguments = Field(default_factory=ScheduleArguments)
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the target's probability that is spread evenly over the vocabulary",
    )
    aux_scope: AuxScope = Field(
        "window",
        description="Scope of a mixture-of-experts model's load-balancing loss: window (costs a forward pass "
        "without gradient), sequence (a different loss, at no cost) or none",
    )
    freeze: list[ShortText] = Field(
        default_factory=list,
        fail_fast=True,
        max_length=100,
        description="Patterns of the names of parameters that are not trained, as in transformer.h.0.*",
    )
    method: Method = Field("full", description='"full", "lora", "qlora", or {"lora": {"r": 16, …}}')
    gradient_checkpointing: Flag = False
    compile: Flag = Field(False, description="torch.compile, with micro-batches of a few shapes")
    attention: Attention = Field(
        "sdpa",
        description="The implementation of attention in transformers; eager is slow, and needs more memory",
    )
    kernels: Kernels = Field(
        "auto",
        description="auto: faster kernels (of liger-kernel, flash-attn, PyTorch, and Accrue's own for the "
        "loss) and samples without padding, where a comparison before the first step shows that the gradient "
        "changes by no more than rounding; none: the model's own kernels, with padding",
    )
    deterministic: Flag = Field(
        False,
        description="Every run of the job on one device of the same kind gives the same bits, even on a GPU, "
        "whose fastest kernels add up in any order; training is then slower, and always in the planned "
        "micro-batches. On a CPU, this only turns tuning off",
    )
    seed: int = Field(42, ge=0, lt=2**31)
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations; null: at the end only")
    early_stopping: EarlyStopping | None = Field(
        None, description="End training when the validation loss no longer falls; needs eval_every"
    )
    save_every: int | None = Field(None, ge=1, description="Steps between checkpoints; null: 50")
    completions: int = Field(
        3,
        ge=0,
        le=200,
        description="Number of held-out prompts to complete before and after training, and at evaluations as "
        "far as that takes little time; needs validation data. With metrics: 20 if not given",
    )
    metrics: list[Annotated[str, StringConstraints(max_length=64)]] = Field(
        default_factory=list,
        fail_fast=True,
        max_length=10,
        description="Names of programs in the service's ACCRUE_METRIC_PROGRAMS_DIR that score these "
        "completions, before and after training and at every evaluation",
    )
    report_to: list[Tracker] = Field(
        default_factory=list,
        fail_fast=True,
        max_length=3,
        description="Experiment trackers that also get the metrics; the worker must have their packages",
    )
    timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds of running after which the job writes a checkpoint and fails with the code "
        "timeout; resuming it continues from there",
    )

    @model_validator(mode="after")
    def _rate_of_the_method(self) -> "TrainingConfig":
        """Adapters have a default rate of their own."""
        if "learning_rate" not in self.model_fields_set and self.method != "full":
            vars(self)["learning_rate"] = LORA_LEARNING_RATE  # it still counts as not given
        return self

    @model_validator(mode="before")
    @classmethod
    def _adam_has_no_weight_decay(cls, given: Any) -> Any:
        if (
            isinstance(given, dict)
            and str(given.get("optimizer")).lower() == "adam"
            and given.get("weight_decay")
        ):
            raise ValueError(
                "optimizer adam is treated as adamw, which is identical only without weight_decay: use "
                "adamw, or leave weight_decay out"
            )
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingConfig":
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("give epochs or max_steps, not both")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        if self.lr_scheduler == "one_cycle" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError("one_cycle has its own warmup: set lr_scheduler_args.pct_start instead")
        if self.early_stopping is not None and self.eval_every is None:
            raise ValueError("early_stopping needs evaluations during training: set eval_every")
        reject_unknown_arguments(
            "optimizer_args", self.optimizer_args, set(OPTIMIZER_ARGUMENTS[self.optimizer]), self.optimizer
        )
        if self.objective is not None:
            allowed = set(OBJECTIVE_ARGUMENTS[self.objective])
            reject_unknown_arguments("objective_args", self.objective_args, allowed, self.objective)
        reject_unknown_arguments(
            "lr_scheduler_args",
            self.lr_scheduler_args,
            set(SCHEDULE_ARGUMENTS[self.lr_scheduler]),
            self.lr_scheduler,
        )
        return self
