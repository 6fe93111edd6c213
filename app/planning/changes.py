"""Alternatives to a training step: changes that might make it fit, or make it faster or leaner."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec

Applied = Callable[[Recipe], Recipe]

DEFAULT_LORA = LoraSpec(r=16, alpha=32, dropout=0.0, target_modules=None, merge=False)


@dataclass(frozen=True)
class Change:
    """A change to a recipe or to the length of its samples, as fields of a request."""

    description: str
    recipe: Recipe
    sequence: int


def changes(recipe: Recipe, sequence: int) -> Iterator[Change]:
    """The possible changes, ordered by how much they change the training, the least first."""
    found = [recipe]
    for name, apply in _CHANGES:
        changed = apply(recipe)
        if changed not in found:
            found.append(changed)
            yield Change(name, changed, sequence)
    if sequence >= 4:
        yield Change(f"max_length: {sequence // 2}", recipe, sequence // 2)
    for name, apply in _OTHER_METHODS:
        changed = apply(recipe)
        if changed not in found:
            found.append(changed)
            yield Change(name, changed, sequence)


def _with(**fields: Any) -> Applied:
    return lambda recipe: recipe.model_copy(update=fields)


def _unless(already: Callable[[Recipe], bool], change: Applied) -> Applied:
    return lambda recipe: recipe if already(recipe) else change(recipe)


def _adapted(recipe: Recipe) -> bool:
    return recipe.lora is not None


_CHANGES: tuple[tuple[str, Applied], ...] = (
    ("gradient_checkpointing: false", _with(gradient_checkpointing=False)),
    ("gradient_checkpointing: true", _with(gradient_checkpointing=True)),
    ("accumulate_gradients_on_cpu: true",
     _unless(lambda recipe: recipe.device == "cpu", _with(accumulate_on_cpu=True))),
    ("use_cpu_offload: true",
     _unless(lambda recipe: recipe.device == "cpu" or recipe.optimizer == "adamw_8bit",
             _with(optimizer_on_cpu=True))),
    ('mixed_precision: "bf16"',
     _unless(lambda recipe: recipe.precision not in ("fp32", "tf32") or recipe.device == "cpu",
             _with(precision="bf16"))),
    ("optimizer: adamw_8bit",
     _unless(lambda recipe: recipe.device == "cpu" or recipe.optimizer != "adamw" or _adapted(recipe)
             or recipe.optimizer_on_cpu,
             _with(optimizer="adamw_8bit"))),
    ("optimizer: adafactor",
     _unless(lambda recipe: recipe.optimizer not in ("adamw", "lamb") or _adapted(recipe),
             _with(optimizer="adafactor"))),
    ('mixed_precision: "pure_bf16"', _with(precision="pure_bf16")),
)  # fmt: skip

_OTHER_METHODS: tuple[tuple[str, Applied], ...] = (
    ("method: lora", _unless(_adapted, _with(lora=DEFAULT_LORA))),
    ("method: lora, gradient_checkpointing: true",
     _unless(_adapted, _with(lora=DEFAULT_LORA, gradient_checkpointing=True))),
    ("method: qlora, gradient_checkpointing: true",
     _unless(lambda recipe: recipe.quantised or recipe.device == "cpu",
             lambda recipe: recipe.model_copy(update={"lora": recipe.lora or DEFAULT_LORA, "quantised": True,
                                                      "gradient_checkpointing": True}))),
)  # fmt: skip
