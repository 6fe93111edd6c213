"""Memory profiles: what a training step's memory depends on, and the memory predicted for a micro-batch."""

from typing import Literal

from pydantic import Field

from app.contract.base import Frozen
from app.contract.model_reference import LoraSpec
from app.contract.spec import Attention, AuxScope, OptimizerName, RunPrecision, ZeroStage


class Recipe(Frozen):
    """The options of a training step that its memory depends on, apart from the model and the samples."""

    device: Literal["cpu", "cuda"]
    precision: RunPrecision
    optimizer: OptimizerName = "adamw"
    momentum: bool = False
    """Whether sgd keeps a momentum buffer; lars always does, and other optimizers ignore this."""
    lora: LoraSpec | None = None
    quantised: bool = False
    """The weights that are not trained are kept in 4 bits."""
    freeze: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    packing: bool = False
    label_smoothing: bool = False
    aux_scope: AuxScope = "window"
    clips: bool = True
    accumulate_in_fp32: bool = True
    accumulate_on_cpu: bool = False
    optimizer_on_cpu: bool = False
    """Whether the optimizer and its states are on the CPU."""
    parts: int = 1
    """How many ranks each parameter is divided among (fsdp)."""
    zero_stage: ZeroStage = 3
    """What is divided, if there are several parts."""
    direct_sums: bool = False
    """Whether the gradients of large weights are added to their sums directly
    (workers/training/gradients/direct_sums.py)."""
    scores: int = 0
    """The scores that the model gives to a whole sequence (classification, reward); 0: a language model,
    with its output head."""
    compile: bool = False
    """Whether torch compiles the model. Memory is simulated for the step that is not compiled, and corrected
    by what compiled ones took."""
    flash_attention: bool = True
    """Whether the GPU has flash attention, which needs compute capability 8.0 as bf16 does."""
    expandable_segments: bool = False
    """Whether PyTorch's caching allocator uses expandable segments."""
    context_bytes: int | None = None
    """What the process holds on a GPU besides its tensors, as measured there; None if unknown. Not part of a
    profile, which is of tensors."""


Kind = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")

Part = Literal["forward and backward", "optimizer"]


class PointMemory(Frozen):
    """Live bytes by kind at one point of the step, as a function of the micro-batch's rows.

    Each kind takes base + slope × rows + square × rows².
    """

    part: Part
    base: dict[Kind, float]
    slope: dict[Kind, float]
    square: dict[Kind, float] = Field(default_factory=dict)
    """Bytes per rows², for example of a packed row's mask; kinds without such memory are left out."""

    def by_kind(self, rows: float) -> dict[Kind, float]:
        """The bytes of each kind."""
        return {
            kind: base + rows * self.slope[kind] + rows**2 * self.square.get(kind, 0.0)
            for kind, base in self.base.items()
        }

    def bytes(self, rows: float) -> float:
        """The bytes of all kinds together."""
        return sum(self.by_kind(rows).values())


class Stretch(Frozen):
    """The points of the step that may be its peak, for micro-batches from `rows` up to the next stretch."""

    rows: float
    once: tuple[PointMemory, ...]
    """The points if the window is a single micro-batch."""
    accumulating: tuple[PointMemory, ...]
    """The points if the window has several micro-batches: earlier gradients are held while later ones run."""


class Curve(Frozen):
    """Peak memory of a step as a function of the micro-batch's rows, each of `sequence` tokens."""

    sequence: int
    stretches: tuple[Stretch, ...]
    reserved: tuple[tuple[int, float], ...]
    """(rows, the caching allocator's ratio of reserved to allocated bytes), by increasing rows."""
    parameters: int
    trainable: int


class Profile(Frozen):
    """The memory curve of a step, its source, and its error where it was checked."""

    source: Literal["measured", "simulated"]
    curve: Curve
    checked_rows: int | None
    check_error: float | None
    """The curve's relative error at `checked_rows`, which it was not fitted to; None: not checked yet."""
    seconds: float
    """How many seconds it took to make the profile."""
