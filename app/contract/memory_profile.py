"""Memory profiles: what a training step's memory depends on, and its predicted course."""

from typing import Literal

from pydantic import Field

from app.contract.base import Frozen
from app.contract.spec import Attention, AuxScope, LoraSpec, OptimizerName, RunPrecision


class Recipe(Frozen):
    """How a training step is made, as far as its memory depends on it; without the model and its samples."""

    device: Literal["cpu", "cuda"]
    precision: RunPrecision
    optimizer: OptimizerName = "adamw"
    momentum: bool = False
    """Whether sgd keeps one; lars always does, and the others have their own."""
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
    expandable_segments: bool = False
    """The caching allocator's segments grow (PyTorch's allocator settings)."""


Kind = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")

Part = Literal["forward and backward", "optimizer"]


class Line(Frozen):
    """Bytes live at one point of the step, as a function of the micro-batch, by kind:
    base + slope × rows + square × rows²."""

    part: Part
    base: dict[Kind, float]
    slope: dict[Kind, float]
    square: dict[Kind, float] = Field(default_factory=dict)
    """Bytes per squared row, such as a packed row's mask; a kind without such memory is left out."""

    def parts(self, rows: float) -> dict[Kind, float]:
        """Each kind's."""
        return {
            kind: base + rows * self.slope[kind] + rows**2 * self.square.get(kind, 0.0)
            for kind, base in self.base.items()
        }

    def bytes(self, rows: float) -> float:
        """All kinds together."""
        return sum(self.parts(rows).values())


class Stretch(Frozen):
    """The highest of the step's points for micro-batches from `rows` on, up to the next stretch."""

    rows: float
    once: tuple[Line, ...]
    """Where the window is one micro-batch."""
    accumulating: tuple[Line, ...]
    """Where it is several: gradients of the earlier ones are there while the later are worked on."""


class Curve(Frozen):
    """Peak memory of a step as a function of the micro-batch's rows; all of the same length, in tokens."""

    sequence: int
    stretches: tuple[Stretch, ...]
    reserved: tuple[tuple[int, float], ...]
    """(rows, bytes that the caching allocator reserves over bytes allocated), from the fewest rows up."""
    parameters: int
    trainable: int


class Profile(Frozen):
    """What is known of a step's memory, from where, and how wrong that source was so far."""

    source: Literal["measured", "simulated"]
    curve: Curve
    checked_rows: int | None
    check_error: float | None
    """None: not checked yet. The curve over a trace at `checked_rows`, which it was not made from, less 1."""
    seconds: float
    """What it took to make."""
