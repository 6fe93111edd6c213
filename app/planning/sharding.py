"""Memory of a rank that holds only a part of the model (fsdp), and which jobs can be divided so.

A rank keeps 1/N of the weights, gradients and optimizer states. While a layer runs, its weights are whole,
and so are those of the next layer, which are fetched ahead; in the backward pass, so are the layer's
gradients. What is outside of the layers (embeddings and output head) stays whole during a step
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from dataclasses import dataclass

from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.plan import Source
from app.contract.spec import OptimizerName, Spec
from app.planning.estimate import Estimate
from app.planning.memory import Memory

ELEMENTWISE: tuple[OptimizerName, ...] = ("adamw", "lion", "sgd")
"""Optimizers that treat each element by itself, so that a part of a parameter can be trained alone."""

_WHOLE_LAYERS = 2


@dataclass(frozen=True)
class OfOneRank:
    """The estimate for one of several ranks among which a model is divided."""

    whole: Estimate
    """The estimate for one device that holds the whole model."""
    architecture: Architecture
    recipe: Recipe
    ranks: int
    expected_error: float | None = None
    source: Source = "formula"

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        whole = self.whole.memory(rows, accumulating=accumulating)
        outside = min(1.0, 2 * self.architecture.vocabulary * self.architecture.hidden_size
                      / self.architecture.parameters)  # fmt: skip
        layer = (1 - outside) / self.architecture.layers
        together = outside + _WHOLE_LAYERS * layer
        copies = self._cast_copies(whole.weights_bytes)
        kept = whole.weights_bytes - copies
        casts = copies * together if self.recipe.gradient_checkpointing else copies
        return whole.model_copy(
            update={
                "weights_bytes": int(kept / self.ranks + kept * together + casts),
                "gradients_bytes": int(whole.gradients_bytes * (1 / self.ranks + together)),
                "optimizer_bytes": whole.optimizer_bytes // self.ranks,
            }
        )

    def _cast_copies(self, weights_bytes: int) -> float:
        """Bytes of autocast's copies of the weights in half precision, which the backward pass needs."""
        casts = self.recipe.precision in ("bf16", "fp16") and self.recipe.lora is None
        return weights_bytes / 3 if casts else 0.0


def why_not_divided(spec: Spec) -> str | None:
    """Why a job's model cannot be divided among devices; None if it can."""
    if spec.optimizer.name not in ELEMENTWISE:
        return (
            f"{spec.optimizer.name} needs whole parameters: choose adamw, lion or sgd, or set distributed to "
            "ddp"
        )
    reasons = {
        "qlora": spec.method.name == "qlora",
        "clip_mode each_micro_batch": spec.clip_mode == "each_micro_batch",
        "mixed_precision pure_bf16": spec.precision == "pure_bf16",
        "accumulate_gradients_on_cpu": spec.accumulate_gradients_on_cpu,
        "compile": spec.compile,
        "tune": spec.tune is not None,
    }
    found = next((name for name, applies in reasons.items() if applies), None)
    return None if found is None else f"fsdp and {found} cannot be combined: leave one of them out"
