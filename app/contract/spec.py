"""The spec of a job: what is trained, frozen at submission.

The spec says what is trained; the plan says how, and never changes the training (docs/idea.md).
"""

from math import ceil
from typing import Literal

from pydantic import Field

from app.contract.accumulation import ClipMode, Precision
from app.contract.base import Frozen
from app.contract.data_formats import DataFormat
from app.contract.model_reference import REWARD, LoraSpec, ModelReference
from app.contract.objective import SEQUENCES_PER_SAMPLE, ObjectiveSpec

OptimizerName = Literal["adamw", "adamw_8bit", "lion", "lamb", "lars", "sgd", "adafactor"]
ScheduleName = Literal["constant", "linear", "cosine", "one_cycle"]
WarmupShape = Literal["linear", "quadratic", "constant"]
Overlength = Literal["truncate", "split", "error"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Kernels = Literal["auto", "none"]
AuxScope = Literal["window", "sequence", "none"]
RunPrecision = Literal["fp32", "tf32", "bf16", "fp16", "pure_bf16"]
Tune = Literal["while_training", "first", "only"]
RequestedTune = Literal["while_training", "off", "first", "only"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


class ValidationSpec(Frozen):
    """The validation data: a separate file, or a share of the training file's lines."""

    file_id: str | None
    sha256: str | None
    format: DataFormat | None
    share: float | None


class DataSpec(Frozen):
    """The training data: one stored JSONL file, by its id and content."""

    file_id: str
    sha256: str
    format: DataFormat
    examples: int
    max_length: int
    """Longest sequence in tokens; `overlength` says what happens to longer samples."""
    overlength: Overlength
    packing: bool
    """Whether the samples of a micro-batch share one row, without padding."""
    validation: ValidationSpec | None
    with_mismatches: bool = False
    """Whether each prompt is also prepared with the completion of another sample (KTO)."""
    classes: tuple[str, ...] = ()
    """The classes to choose from, for classification; empty for other objectives."""

    @property
    def sequences_per_sample(self) -> int:
        """The sequences that a sample has in a micro-batch: two if it is a pair."""
        return SEQUENCES_PER_SAMPLE.get(self.format, 1)

    @property
    def tokens_per_sample(self) -> int:
        """The most tokens of a sample, all of its sequences together."""
        return self.max_length * self.sequences_per_sample

    def held_out(self) -> int:
        """The number of lines of the training file kept for validation; at least one remains for training."""
        if self.validation is None or self.validation.share is None:
            return 0
        return min(max(1, round(self.validation.share * self.examples)), self.examples - 1)


class OptimizerSpec(Frozen):
    """An optimizer. From `betas` on, fields that it does not take are None (`OPTIMIZER_ARGUMENTS`)."""

    name: OptimizerName
    learning_rate: float
    """The peak learning rate, after any scaling for the effective batch."""
    weight_decay: float
    decays_biases: bool = True
    """Whether biases and parameters of norms that are matrices have weight decay, as in jobs of earlier
    versions."""
    betas: tuple[float, float] | None
    eps: float | None
    momentum: float | None
    nesterov: bool | None
    trust_coefficient: float | None


class ScheduleSpec(Frozen):
    """The learning rate as a function of updates."""

    name: ScheduleName
    warmup_steps: int | None
    """None: `warmup_ratio` of the steps, resolved once these are known."""
    warmup_ratio: float
    warmup_rounds_up: bool = False
    """Whether that share is rounded up to whole steps, as in transformers; jobs of earlier versions round it
    down."""
    warmup_shape: WarmupShape
    warmup_start: float
    """Share of the peak rate at the first update."""
    final: float
    """Share of the peak rate at the end of linear and cosine."""
    pct_start: float
    """one_cycle: share of the updates in which the rate rises."""
    div_factor: float
    """one_cycle: the peak rate divided by the first rate."""
    final_div_factor: float
    """one_cycle: the first rate divided by the last one."""

    def warmup(self, steps_total: int) -> int:
        """The number of warmup updates in a run of `steps_total` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        updates = self.warmup_ratio * steps_total
        return ceil(updates) if self.warmup_rounds_up else int(updates)


class MethodSpec(Frozen):
    name: Literal["full", "lora", "qlora"]
    lora: LoraSpec | None


class RampSpec(Frozen):
    """How the effective batch grows while training."""

    name: Literal["constant", "linear", "noise_scale", "loss_variance"]
    warmup_steps: int
    loss_variance_threshold: float
    max_effective_batch_size: int


class EarlyStopping(Frozen):
    """Ends a run after `patience` evaluations in a row without a gain: a loss that is at least `min_delta`
    nats lower than at the previous gain."""

    patience: int = Field(ge=1, le=1000)
    min_delta: float = Field(0.0, ge=0)


Strategy = Literal["ddp", "fsdp", "independent"]
"""How several devices share the work: each has a copy of the model (ddp), or a part of it (fsdp), or each
trains a model of its own on its own part of the data (independent)."""


ZeroStage = Literal[1, 2, 3]
"""What ranks divide under fsdp (Rajbhandari et al. 2020, section 5): optimizer states (1), also gradients
(2), also weights (3)."""


GradientCompression = Literal["bf16", "fp16"]
"""The precision in which ranks send gradients to each other (workers/training/distributed/compression.py)."""


MAX_EVALUATIONS = 5_000
"""The most evaluations of a job during training: each is an event, and charts show all of them."""


class Shard(Frozen):
    """Every `count`-th sample, from the sample `index` on."""

    index: int
    count: int


class RequestedSplit(Frozen):
    """The requested micro-batches per device; None: planned."""

    accumulation_steps: int | None
    micro_batch_size: int | None
    devices: int
    """Devices that the effective batch was computed for."""
    steps_by_device: tuple[int, ...] | None = None
    """Micro-batches per step of each device, if they are not the same for all."""


class MemoryLimits(Frozen):
    max_memory_usage: float
    memory_safety_margin: float

    def budget(self, memory_bytes: int) -> int:
        """Bytes of a device's memory that may be used."""
        return int(min(self.max_memory_usage, 1 - self.memory_safety_margin) * memory_bytes)


class Spec(Frozen):
    """Everything that the trained weights depend on, with every default filled in that does not depend on the
    device; the plan has the rest."""

    model: ModelReference
    data: DataSpec
    seed: int
    method: MethodSpec
    effective_batch_size: int
    """Samples (of preferences: pairs) per optimizer step over all devices; where it ramps, see `ramp`."""
    ramp: RampSpec
    epochs: int | None
    max_steps: int | None
    """Exactly one of `epochs` and `max_steps` is given."""
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    label_smoothing: float
    """Of the tokens' targets; dpo has one of its own (`ObjectiveSpec`)."""
    aux_scope: AuxScope
    """The scope over which a mixture-of-experts model's load-balancing loss is computed."""
    gradient_clipping: float | None
    clip_mode: ClipMode
    loss_spike_zscore: float | None
    """A window whose loss is this many standard deviations above the recent ones is skipped."""
    precision: Literal["auto"] | Precision
    accumulate_in_fp32: bool
    """Gradients of parameters in a lower precision are summed in fp32."""
    accumulate_gradients_on_cpu: bool
    use_cpu_offload: bool = False
    """Whether the optimizer's states are kept in host memory and its step runs on the CPU."""
    gradient_checkpointing: bool
    attention: Attention
    kernels: Kernels = "none"
    """auto: also kernels of liger-kernel and flash-attn, where they are installed and keep the gradient."""
    compile: bool
    freeze: tuple[str, ...]
    eval_every: int | None
    early_stopping: EarlyStopping | None
    save_every: int
    """Optimizer steps between checkpoints."""
    timeout_seconds: float | None
    certificate: bool
    """Compare the first window's gradient with that of another split before training."""
    noise_scale_every: int | None
    """Measure the gradient noise scale once in this many windows; None: never."""
    split: RequestedSplit
    strategy: Strategy | None = None
    """None: ddp, or fsdp if only that fits."""
    zero_stage: ZeroStage | None = None
    """What is divided, if fsdp is requested; None: everything (3)."""
    gradient_compression: GradientCompression | None = None
    """None: ranks send gradients in their own precision, so that their sum is exact."""
    average: bool = False
    """Whether the weights of independent replicas are averaged at the end."""
    shard: Shard | None = None
    """The part of the training data that is used; None: all."""
    memory: MemoryLimits
    auto_adjust_batch_size: bool
    log_accumulation: bool = True
    """Whether to report how far the current window has progressed."""
    log_memory_usage: bool
    log_micro_losses: bool
    log_gradients: bool
    report_to: tuple[Tracker, ...]
    profile: bool
    deterministic: bool = False
    """Whether a GPU's kernels give the same bits each time; a CPU's always do."""
    completions: int = 0
    """The number of held-out prompts that are completed before and after training."""
    objective: ObjectiveSpec | None = None
    """None: supervised fine-tuning, whose loss is a sum over tokens."""
    metrics: tuple[str, ...] = ()
    """The operator's programs that score these completions."""
    tune: Tune | None = None
    """while_training: try other micro-batch sizes in windows of the job; first: measure them after the first
    steps; only: measure them, and make no model; None: use the planned size."""

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores that the model gives to a whole sequence: the classes, or only `reward`;
        empty for a language model."""
        if self.objective is None or not self.objective.scores_sequences:
            return ()
        return self.data.classes or (REWARD,)

    def batch_at(self, step: int) -> int:
        """The effective batch of an update (counted from 0), unless it depends on measurements.

        A linear ramp grows in equal steps, and reaches the full batch after `warmup_steps` updates.
        """
        if self.ramp.name != "linear" or step >= self.ramp.warmup_steps:
            return self.effective_batch_size
        return ceil(self.effective_batch_size * (step + 1) / (self.ramp.warmup_steps + 1))

    def steps_for(self, samples: int) -> int:
        """Optimizer steps of the whole run; the partial window at an epoch's end is a step of its own."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        steps = consumed = epoch = 0
        while epoch < self.epochs and steps < self.ramp.warmup_steps and self.ramp.name == "linear":
            # All steps at once that have the same batch: there may be a million of them.
            batch = self.batch_at(steps)
            end = min(
                self.ramp.warmup_steps, batch * (self.ramp.warmup_steps + 1) // self.effective_batch_size
            )
            to_epoch_s_end = max(1, ceil((samples - consumed) / batch))
            if to_epoch_s_end > end - steps:
                consumed += (end - steps) * batch
                steps = end
                continue
            steps, consumed, epoch = steps + to_epoch_s_end, 0, epoch + 1
            of_epoch = max(1, ceil(samples / batch))
            whole_epochs = min(self.epochs - epoch, (end - steps) // of_epoch)
            steps, epoch = steps + whole_epochs * of_epoch, epoch + whole_epochs
        if epoch < self.epochs:
            steps += ceil((samples - consumed) / self.effective_batch_size)
            steps += (self.epochs - epoch - 1) * ceil(samples / self.effective_batch_size)
        return steps
