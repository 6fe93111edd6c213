"""How many layers of a model must be traced to predict the whole model."""

import re
from dataclasses import dataclass
from math import lcm
from typing import Any

from app.contract.memory_profile import Recipe
from app.planning.estimated_sizes import LAYER_COUNTS, text_part
from workers.profiling.unroll import GROUPS, LAST


@dataclass(frozen=True)
class Depth:
    """How many layers a model is traced with, and how many it has; layers come in groups of `period`."""

    period: int
    traced: int
    copies: int
    """How many times the third of the four groups occurs at full depth; 0 if the whole model is traced."""

    def group_of(self, layer: int) -> int:
        """A layer's group; remaining layers that fill no group belong to the last group."""
        return min(layer // self.period, LAST)


def depth_for(layers: int, period: int) -> Depth:
    """Four groups and the layers that fill no group represent a model; one with fewer than five groups is
    traced whole.

    >>> depth_for(32, 1)
    Depth(period=1, traced=4, copies=29)
    """
    further, left = divmod(layers - GROUPS * period, period)
    if further <= 0:
        return Depth(period, layers, 0)
    return Depth(period, GROUPS * period + left, further + 1)


_MAY_BE_A_LAYER = re.compile(r"^[\d*]*\d[\d*]*$|\*\d")
"""A part of a pattern, between dots, that may match the numbers of some layers; `*` also matches dots."""


def treats_layers_differently(recipe: Recipe) -> bool:
    """Whether the recipe freezes or adapts the weights of some layers by their number, so that one layer does
    not represent the others. If in doubt, yes.

    >>> plain = Recipe(device="cpu", precision="fp32")
    >>> treats_layers_differently(plain.model_copy(update={"freeze": ("*.mlp.fc1.*", "transformer.wte.*")}))
    False
    >>> treats_layers_differently(plain.model_copy(update={"freeze": ("transformer.h.1?.*",)}))
    True
    >>> treats_layers_differently(plain.model_copy(update={"freeze": ("transformer.h*0.attn*",)}))
    True
    """
    targets = () if recipe.lora is None else recipe.lora.target_modules or ()
    patterns = (*recipe.freeze, *targets)
    parts = (part for pattern in patterns for part in pattern.split("."))
    return any("?" in part or "[" in part or _MAY_BE_A_LAYER.search(part) is not None for part in parts)


def period_of(config: dict[str, Any], sequence: int) -> int:
    """The period at which the kinds of layers repeat (the first period itself may differ), or the number of
    layers if they do not repeat.

    >>> period_of({"model_type": "llama", "num_hidden_layers": 32}, 512)
    1

    Args:
        sequence: tokens of a sample; up to the `sliding_window`, sliding attention equals full attention.
    """
    text = _text_of(_whole(config))
    layers = layers_in(config)
    if text.get("mlp_only_layers"):
        return layers
    window = text.get("sliding_window")
    kinds = _kinds(text, layers, sliding_is_full=isinstance(window, int) and sequence <= window)
    repeats = (n for n in range(1, layers) if kinds[2 * n :] == kinds[n:-n])
    return lcm(next(repeats, layers), int(text.get("decoder_sparse_step") or 1))


def _kinds(text: dict[str, Any], layers: int, *, sliding_is_full: bool = False) -> list[tuple[str, ...]]:
    """Each layer's kind: what any of the config's lists by layer says of it."""
    lists = [value for value in text.values() if _is_by_layer(value, layers)]
    dense = text.get("first_k_dense_replace")
    if isinstance(dense, int):  # DeepSeek: the first layers have no experts
        lists.append([layer < dense for layer in range(layers)])
    by_layer = [tuple(str(each[layer]) for each in lists) for layer in range(layers)]
    if sliding_is_full:
        return [
            tuple("full_attention" if each == "sliding_attention" else each for each in kind)
            for kind in by_layer
        ]
    return by_layer


def _is_by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers > 1


def config_for(fields: dict[str, Any]) -> Any:
    """transformers' config object for the content of a config.json, in which infinite numbers are written as
    objects: {"__float__": "Infinity"}."""
    from transformers import AutoConfig

    own = _with_floats(fields)
    return AutoConfig.for_model(own.pop("model_type"), **own)


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _whole(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json with all fields that transformers fills in."""
    filled: dict[str, Any] = config_for(config).to_dict()
    return filled


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    return dict(text_part(config))


def layers_in(config: dict[str, Any]) -> int:
    """The number of layers of the language model.

    Raises:
        ValueError: the config does not name it.
    """
    text = text_part(config)
    found = next((text[name] for name in LAYER_COUNTS if text.get(name) is not None), None)
    if found is None:
        found = config_for(config).get_text_config().num_hidden_layers
    return int(found)


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model with only `layers` layers, each of the kind that it has in the full model.

    Kinds that only appear later in the full model replace those of the last layers; they differ only in the
    mask.
    """
    whole = layers_in(config)
    if layers == whole:
        return config
    filled = _whole(config)
    text = text_part(filled)
    shorter: dict[str, Any] = {name: layers for name in LAYER_COUNTS if text.get(name) == whole}
    shorter |= {name: value[:layers] for name, value in text.items() if _is_by_layer(value, whole)}
    if "layer_types" in shorter:
        kinds, own = text["layer_types"], shorter["layer_types"]
        later = [kind for kind in dict.fromkeys(kinds) if kind not in own]
        own[len(own) - len(later) :] = later
        shorter["layer_types"] = own
    if text is filled:
        return {**filled, **shorter}
    (name,) = (name for name, value in filled.items() if value is text)
    return {**filled, name: {**text, **shorter}}
