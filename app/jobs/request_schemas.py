"""What a client sends to have a model trained."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from app.contract.accumulation import MAX_ACCUMULATION_STEPS, AccumulationConfig
from app.contract.base import Flag, Request, ShortText
from app.contract.model_reference import StartingModel
from app.contract.spec import (
    GradientCompression,
    RequestedTune,
    ZeroStage,
)
from app.contract.worker_labels import Executor, Labels
from app.datasets.dataset_config import DatasetConfig
from app.jobs.training_config import TrainingConfig
from app.planning.devices import MAX_GPU_ID

WebhookUrl = Annotated[
    str, StringConstraints(pattern=r"^[Hh][Tt][Tt][Pp][Ss]?://[^\s/?#@]+([/?#]\S*)?$", max_length=2000)
]

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]


UserId = (
    Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)]
    | Annotated[str, StringConstraints(strict=True, max_length=200)]
)
"""A label chosen by the client: an integer that JSON represents exactly, or a short string."""


RequestedStrategy = Literal["ddp", "fsdp", "deepspeed", "dataparallel"]
"""`dataparallel` is carried out as `ddp`, and `deepspeed` as `fsdp` (ZeRO stage 2, unless another is
requested): their results would be the same."""


def _reject_powersgd(given: Any) -> Any:
    if given == "powersgd":
        raise ValueError(
            "powersgd is not available, since what it leaves out depends on how the work is split: choose "
            "bf16 or fp16, which only round"
        )
    return given


Compression = Annotated[GradientCompression, BeforeValidator(_reject_powersgd)]


class DistributedConfig(Request):
    """How several devices share the work."""

    strategy: RequestedStrategy | None = Field(
        None,
        description="ddp: each device has a copy of the model; fsdp: each has a part of it; deepspeed: the "
        "same as fsdp with zero_stage 2; null: ddp, or fsdp if full copies do not fit",
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="What is sharded under fsdp: optimizer states (1), also gradients (2), also weights "
        "(3, the default); 0: nothing, which is ddp",
    )
    cpu_offload: Flag = Field(
        False, description="Keep the optimizer's states in host memory, as use_cpu_offload does"
    )
    gradient_compression: Compression | None = Field(
        None,
        description="Send gradients between devices in 16 bits: half the traffic, and training only "
        "approximates that of one device; needs ddp. Null: exact",
    )

    @model_validator(mode="after")
    def _options_agree(self) -> "DistributedConfig":
        self.check()
        return self

    def check(self) -> None:
        """Checks that the options agree. Options may also be given in several places of a request.

        Raises:
            ValueError: two of them contradict each other.
        """
        if self.gradient_compression is not None and self.carried_out_as == "fsdp":
            raise ValueError(
                "gradient_compression needs strategy ddp: set it, or leave gradient_compression out"
            )
        if self.zero_stage and self.strategy in ("ddp", "dataparallel"):
            raise ValueError(f"zero_stage {self.zero_stage} needs strategy fsdp: ddp shards nothing")
        if self.zero_stage == 0 and self.strategy == "fsdp":
            raise ValueError("zero_stage 0 needs strategy ddp: fsdp shards at least the optimizer's states")

    @property
    def carried_out_as(self) -> Literal["ddp", "fsdp"] | None:
        """None: as the plan decides."""
        if self.zero_stage is not None:
            return "fsdp" if self.zero_stage else "ddp"
        match self.strategy:
            case None:
                return None if self.gradient_compression is None else "ddp"
            case "ddp" | "dataparallel":
                return "ddp"
            case "fsdp" | "deepspeed":
                return "fsdp"

    @property
    def stage(self) -> ZeroStage | None:
        """The requested ZeRO stage; None if there is none, or nothing is divided."""
        if self.zero_stage is None:
            return 2 if self.strategy == "deepspeed" else None
        return self.zero_stage or None

    @property
    def warning(self) -> str | None:
        """What the plan says if the strategy is carried out under another name."""
        if self.strategy == "dataparallel":
            return "dataparallel is treated as ddp, which gives the same results faster"
        if self.strategy == "deepspeed" and self.carried_out_as == "ddp":
            return "deepspeed with zero_stage 0 is treated as ddp, since stage 0 shards nothing"
        if self.strategy == "deepspeed":
            return (
                f"deepspeed is carried out by PyTorch's FSDP2, which shards the same state (ZeRO stage "
                f"{self.stage}); the gradient stays that of one device"
            )
        return None


_BESIDE = ("zero_stage", "gradient_compression")
"""Fields of `distributed` that may be given beside it."""


class JobOptions(AccumulationConfig):
    """A job's options, and its accumulation configuration: by fields, by config_id, or both."""

    config_id: ShortText | None = Field(
        None, description="The id of a stored configuration; fields given here override its fields"
    )
    accumulation_steps_by_device: list[Annotated[int, Field(ge=1, le=MAX_ACCUMULATION_STEPS)]] | None = Field(
        None,
        fail_fast=True,
        min_length=1,
        max_length=MAX_GPU_ID + 1,
        description="Micro-batches per step of each device, in the order of gpu_ids; accumulation_steps may "
        "be such a list, too",
    )
    num_gpus: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] | None = Field(
        None,
        description="Number of devices; they must belong to one worker. auto: on CPUs, the fewest on "
        "which the job fits; on GPUs, one for each full micro-batch of a step, but at most as many as "
        "a single worker has. null: the number that gpu_ids, accumulation_steps_by_device or use_multi_gpu "
        "implies; otherwise the stored configuration's; otherwise 1",
    )
    gpu_ids: list[Annotated[int, Field(ge=0, le=MAX_GPU_ID)]] | None = Field(
        None,
        fail_fast=True,
        min_length=1,
        max_length=MAX_GPU_ID + 1,
        description="Train on exactly these GPUs; the job waits until all of them are free",
    )
    use_multi_gpu: Flag | None = Field(None, description="true: all devices of a worker; false: one")
    distributed: RequestedStrategy | DistributedConfig | None = Field(
        None, description="How several devices share the work; null: ddp, or fsdp if full copies do not fit"
    )
    multi_gpu_strategy: RequestedStrategy | DistributedConfig | None = Field(
        None, description="Another name for distributed"
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="Same as distributed.zero_stage; give one of the two"
    )
    gradient_compression: Compression | None = Field(
        None, description="Same as distributed.gradient_compression; give one of the two"
    )
    parallel_independent: Flag = Field(
        False,
        description="Each device trains a model of its own, with these settings, on its own part of the data",
    )
    average: Flag = Field(
        False,
        description="parallel_independent: average the models' weights at the end; false: the job's model is "
        "the one with the lowest loss",
    )
    requirements: Labels = Field(
        default_factory=dict,
        description="Labels that the job's worker must have, such as zone: a (from its "
        "ACCRUE_WORKER_LABELS). Set automatically: hostname, executor, and gpu_type (the name of its GPUs, "
        "or cpu; absent if a worker has GPUs of several types)",
    )
    executor: Executor | None = Field(
        None,
        description="Where the trainer runs: local, on a worker's own machine; slurm, ray or kubernetes, in "
        "the engine of a worker with this ACCRUE_EXECUTOR; null: wherever devices are free first",
    )
    user_id: UserId | None = Field(None, description="A label to filter by")
    priority: int = Field(0, ge=-100, le=100, description="Higher goes first")
    auto_start: Flag = Field(
        True, description="false: the job is created paused, and waits until it is resumed"
    )
    webhook_url: WebhookUrl | None = Field(
        None,
        description="URL to notify, signed, when the job ends or is paused; null: ACCRUE_WEBHOOK_URL",
    )
    profile: Flag = Field(False, description="Profile one steady-state window with torch.profiler")
    tune: RequestedTune | None = Field(
        None,
        description="When to look for the fastest micro-batch size. while_training: try other sizes during "
        "the job's own steps, if at least 100 are left (the default on one device, if the request sets "
        "neither micro_batch_size nor accumulation_steps); first: after two steps, measure several sizes, "
        "then train with the smallest that is about as fast as the fastest; only: measure, and make no "
        "model; off: use the planned size",
    )

    @model_validator(mode="after")
    def _rate_can_be_scaled(self) -> "JobOptions":
        requested = {"gradient_scaling", "lr_scaling"} & self.model_fields_set
        scales = self.gradient_scaling and self.lr_scaling != "none"
        if requested and scales and self.base_batch_size is None and self.config_id is None:
            raise ValueError(
                f"{min(requested)} scales the learning rate from the batch that it was chosen for: set "
                f"base_batch_size to that batch, or leave {min(requested)} out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _steps_of_each_device(cls, given: Any) -> Any:
        """A list of accumulation steps is one for each device."""
        if isinstance(given, dict) and isinstance(given.get("accumulation_steps"), list):
            if "accumulation_steps_by_device" in given:
                raise ValueError(
                    "accumulation_steps and accumulation_steps_by_device set the same thing: leave one out"
                )
            own = {name: value for name, value in given.items() if name != "accumulation_steps"}
            return {**own, "accumulation_steps_by_device": given["accumulation_steps"]}
        return given

    @model_validator(mode="after")
    def _executor_is_a_label(self) -> "JobOptions":
        if self.executor is not None:
            if self.requirements.get("executor", self.executor) != self.executor:
                raise ValueError("executor and requirements.executor differ: leave one out")
            self.requirements = {**self.requirements, "executor": self.executor}
        return self

    @model_validator(mode="after")
    def _devices_agree(self) -> "JobOptions":
        if self.gpu_ids is not None and self.num_gpus not in (None, len(self.gpu_ids)):
            raise ValueError(
                f"num_gpus is {self.num_gpus}, but gpu_ids names {len(self.gpu_ids)}: leave num_gpus out"
            )
        if self.gpu_ids is not None and len(set(self.gpu_ids)) != len(self.gpu_ids):
            raise ValueError("gpu_ids names a GPU twice")
        by_device = self.accumulation_steps_by_device
        if by_device is not None:
            if self.accumulation_steps is not None:
                raise ValueError(
                    "accumulation_steps and accumulation_steps_by_device set the same thing: leave one out"
                )
            named = len(self.gpu_ids) if self.gpu_ids else self.num_gpus
            if named not in (None, len(by_device)):
                raise ValueError(
                    f"accumulation_steps has {len(by_device)} entries, but {named} devices are requested"
                )
        if self.gpu_ids is not None:  # a worker uses GPUs in the order of their numbers
            if by_device is not None:
                ordered = sorted(zip(self.gpu_ids, by_device, strict=True))
                self.accumulation_steps_by_device = [steps for _, steps in ordered]
            self.gpu_ids = sorted(self.gpu_ids)
        several = self.num_gpus == "auto" or max(self.num_gpus or 1, len(self.gpu_ids or by_device or ())) > 1
        if self.use_multi_gpu is False and several:
            raise ValueError(
                "use_multi_gpu is false, but several devices are requested: leave use_multi_gpu out"
            )
        if None not in (self.distributed, self.multi_gpu_strategy):
            raise ValueError("distributed and multi_gpu_strategy set the same thing: leave one out")
        within = self.distributed or self.multi_gpu_strategy
        for name in _BESIDE if isinstance(within, DistributedConfig) else ():
            if None not in (getattr(self, name), getattr(within, name)):
                raise ValueError(f"{name} is given twice, beside distributed and within it: leave one out")
        if any(getattr(self, name) is not None for name in _BESIDE):
            self.sharing().check()
        return self

    @model_validator(mode="after")
    def _replicas_are_independent(self) -> "JobOptions":
        if self.average and not self.parallel_independent:
            raise ValueError("average needs parallel_independent: otherwise there is only one model")
        if not self.parallel_independent:
            return self
        given = {
            "distributed": self.distributed or self.multi_gpu_strategy or self.sharing().carried_out_as,
            "accumulation_steps for each device": self.accumulation_steps_by_device,
            "tune": self.tune not in (None, "off"),
            "num_gpus auto": self.num_gpus == "auto",
        }
        if found := next((name for name, value in given.items() if value), None):
            raise ValueError(f"parallel_independent and {found} cannot be combined: leave one out")
        return self

    def sharing(self) -> DistributedConfig:
        """How several devices share the work, wherever it is given."""
        given = self.distributed or self.multi_gpu_strategy or DistributedConfig()
        own = given if isinstance(given, DistributedConfig) else DistributedConfig(strategy=given)
        beside = {name: getattr(self, name) for name in _BESIDE if getattr(self, name) is not None}
        return own.model_copy(update=beside)


class TrainingRequest(JobOptions):
    """A job: the model, the data, the effective batch."""

    model_name: StartingModel
    dataset_config: DatasetConfig
    training_config: TrainingConfig = Field(default_factory=TrainingConfig)
    metadata: Metadata = Field(default_factory=dict)
    dry_run: Flag = Field(False, description="Check and plan, queue nothing")

    def accumulation(self) -> AccumulationConfig:
        """The accumulation configuration, with only those fields that the request sets."""
        given = self.model_fields_set & AccumulationConfig.model_fields.keys() - {"sync_gradients"}
        return AccumulationConfig.model_validate({name: getattr(self, name) for name in given})
