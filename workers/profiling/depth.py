"""How many layers of a model must be traced to predict the whole model."""

from dataclasses import dataclass
from math import lcm
from typing import Any

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


def period_of(config: dict[str, Any], sequence: int) -> int:
    """The period at which the kinds of layers repeat, or the number of layers if they do not repeat.

    Args:
        sequence: tokens of a sample; up to the `sliding_window`, sliding attention equals full attention.
    """
    layers = layers_in(config)
    if config.get("mlp_only_layers"):
        return layers
    kinds = _kinds(config)
    if sequence <= (config.get("sliding_window") or 0):
        kinds = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    repeats = (n for n in range(1, layers) if kinds[n:] == kinds[:-n])
    return lcm(next(repeats, layers) if kinds else 1, int(config.get("decoder_sparse_step") or 1))


def _kinds(config: dict[str, Any]) -> list[str]:
    """Each layer's kind, as transformers knows it."""
    made = config_for(config)
    return list(getattr(made, "layer_types", None) or [])


def config_for(fields: dict[str, Any]) -> Any:
    """transformers' config object for the content of a config.json."""
    from transformers import AutoConfig

    own = dict(fields)
    return AutoConfig.for_model(own.pop("model_type"), **own)


def layers_in(config: dict[str, Any]) -> int:
    """The number of layers that a config names."""
    return int(config.get("num_hidden_layers") or config["n_layer"])


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model with only `layers` layers, each of the kind that it has in the full model.

    Kinds that only appear later in the full model replace those of the last layers; they differ only in the
    mask.
    """
    name = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
    whole = _kinds(config)
    kinds = whole[:layers]
    later = [kind for kind in dict.fromkeys(whole) if kind not in kinds]
    kinds[len(kinds) - len(later) :] = later
    return {**config, name: layers, **({"layer_types": kinds} if kinds else {})}
