"""Which jobs can be divided among devices (fsdp), and into what."""

from app.contract.memory_profile import Recipe
from app.contract.spec import OptimizerName, Spec, ZeroStage

ZERO_STAGES: tuple[ZeroStage, ...] = (1, 2, 3)

_DIVIDED: dict[ZeroStage, str] = {
    1: "the optimizer's states",
    2: "gradients and the optimizer's states",
    3: "weights, gradients and the optimizer's states",
}
"""What each stage divides."""


def sharded_across(devices: str, stage: ZeroStage) -> str:
    """What a stage divides among devices, as a clause.

    Args:
        devices: what they are called in the sentence, such as "4 devices".
    """
    return f"{_DIVIDED[stage]} are sharded across {devices} (fsdp, ZeRO stage {stage})"


ELEMENTWISE: tuple[OptimizerName, ...] = ("adamw", "lion", "sgd")
"""Optimizers that treat each element by itself, so that a part of a parameter can be trained alone."""


def is_shardable(recipe: Recipe) -> bool:
    """Whether devices can divide the model, as far as the recipe tells."""
    kept_whole = (
        recipe.quantised, recipe.precision == "pure_bf16", recipe.accumulate_on_cpu, recipe.compile
    )  # fmt: skip
    return recipe.optimizer in ELEMENTWISE and not any(kept_whole)


def may_shard(spec: Spec) -> bool:
    """Whether the planner may divide a job's model among devices, if full copies do not fit."""
    return spec.strategy is None and why_not_sharded(spec) is None


def why_not_sharded(spec: Spec) -> str | None:
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
        "tune": spec.tune in ("first", "only"),
    }
    found = next((name for name, applies in reasons.items() if applies), None)
    return None if found is None else f"fsdp and {found} cannot be combined: leave one of them out"
