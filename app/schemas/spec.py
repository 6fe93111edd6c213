"""What is frozen: the spec at submission, the plan at the claim, and the order that a trainer gets.

The spec says what is trained; the plan says how, and never changes the training (docs/idea.md).
"""

from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from app.schemas.accumulation import ClipMode, Precision
from app.schemas.architecture import ModelReference
from app.schemas.examples import DataFormat
from app.schemas.wire import Frozen

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]
Overlength = Literal["truncate", "split", "error"]
Attention = Literal["sdpa", "eager"]


class DataSpec(Frozen):
    """The training data: one stored JSONL file, by its id and content."""

    file_id: str
    sha256: str
    format: DataFormat
    examples: int
    max_length: int
    """Longest sequence in tokens; what is longer is dealt with as `overlength` says."""
    overlength: Overlength


class OptimizerSpec(Frozen):
    name: OptimizerName
    learning_rate: float
    """The peak learning rate, after any scaling for the effective batch."""
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float


class ScheduleSpec(Frozen):
    """The learning rate as a function of updates."""

    name: ScheduleName
    warmup_steps: int | None
    """null: `warmup_ratio` of the steps, resolved once these are known."""
    warmup_ratio: float


class AskedSplit(Frozen):
    """What the person asked of the micro-batches, per device; null: planned."""

    accumulation_steps: int | None
    micro_batch_size: int | None
    devices: int
    """Devices that the effective batch was reckoned for."""


class MemoryLimits(Frozen):
    max_memory_usage: float
    memory_safety_margin: float

    def budget(self, memory_bytes: int) -> int:
        """Bytes of a device's memory that may be used."""
        return int(min(self.max_memory_usage, 1 - self.memory_safety_margin) * memory_bytes)


class Spec(Frozen):
    """Everything that the trained weights depend on, with no default left open."""

    model: ModelReference
    data: DataSpec
    seed: int
    effective_batch_size: int
    """Samples per optimizer step over all devices."""
    epochs: int | None
    max_steps: int | None
    """Exactly one of `epochs` and `max_steps` is given."""
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    gradient_clipping: float | None
    clip_mode: ClipMode
    precision: Literal["auto"] | Precision
    gradient_checkpointing: bool
    attention: Attention
    freeze: tuple[str, ...]
    save_every: int
    """Optimizer steps between checkpoints."""
    timeout_seconds: float | None
    split: AskedSplit
    memory: MemoryLimits
    auto_adjust_batch_size: bool
    log_memory_usage: bool

    def steps_for(self, samples: int) -> int:
        """Optimizer steps of the whole run; the partial window at an epoch's end is a step of its own."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        return self.epochs * ceil(samples / self.effective_batch_size)


class TokenBudget(Frozen):
    """Micro-batches of at most this many padded tokens (rows × longest row)."""

    rule: Literal["token_budget"] = "token_budget"
    tokens: int


class FixedCount(Frozen):
    """Exactly this many micro-batches a window, of near-equal padded tokens."""

    rule: Literal["count"] = "count"
    micro_batches: int


class FixedSize(Frozen):
    """Micro-batches of at most this many samples."""

    rule: Literal["size"] = "size"
    samples: int


Cut = Annotated[TokenBudget | FixedCount | FixedSize, Field(discriminator="rule")]
"""How a window is cut into micro-batches."""


class PlannedDevice(Frozen):
    gpu_id: int | str
    micro_batch_size: int
    accumulation_steps: int
    token_budget: int | None
    predicted_peak_bytes: int
    memory_limit_bytes: int


class Plan(Frozen):
    """How a spec is run on the devices at hand."""

    predicted: bool
    """true until a worker has claimed the job and planned for its own device."""
    effective_batch_size: int
    accumulation_steps: int
    actual_batch_size_per_gpu: int
    micro_batches: int
    """Micro-batches per step over all devices, with every sample at its full length."""
    devices: tuple[PlannedDevice, ...]
    steps_total: int | None
    """Optimizer steps; null where `overlength: split` leaves the number of samples to the tokenizer."""
    predicted_duration_seconds: float | None
    source: Literal["measured", "simulated", "formula"]
    warnings: tuple[str, ...]
    precision: Literal["fp32", "bf16", "fp16"]
    device: Literal["cpu", "cuda"]
    threads: int | None
    """Threads of the CPU's kernels: they change the order of sums, and so the last bits."""
    cut: Cut


class Order(Frozen):
    """The whole content of a run directory's spec.json: who trains what, how, and from which files."""

    job_id: str
    attempt: int
    spec: Spec
    plan: Plan
    data_file: str
    """Absolute path of the JSONL file."""
    model_path: str
    """Absolute path of a model's directory, or a hub id."""
