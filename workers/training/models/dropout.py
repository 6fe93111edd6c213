"""Switches dropout and other randomness of a model off, for a while or for good."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig


@contextlib.contextmanager
def without_randomness(model: torch.nn.Module) -> Iterator[None]:
    """Disables dropout and jitter within the block; gradient checkpointing stays on."""
    was = {module: module.training for module in model.modules()}
    recompute = {}
    for module in was:
        module.training = False
        if getattr(module, "gradient_checkpointing", False) and "_gradient_checkpointing_func" in vars(
            module
        ):
            # transformers recomputes a layer only if its `training` flag is set; the layer's own forward
            # uses the same flag for dropout.
            module.training = was[module]
            recompute[module] = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = _in_eval_mode(module, module._gradient_checkpointing_func)
    try:
        yield
    finally:
        for module, function in recompute.items():
            module._gradient_checkpointing_func = function
        for module, training in was.items():
            module.training = training


def _in_eval_mode(layer: torch.nn.Module, checkpoint: Any) -> Any:
    """A checkpointing function under which the layer's own forward is not in training mode."""

    def quiet(function: Any, *arguments: Any) -> Any:
        def forward(*inner: Any) -> Any:
            was, layer.training = layer.training, False
            try:
                return function(*inner)
            finally:
                layer.training = was

        return checkpoint(forward, *arguments)

    return quiet


def turn_dropout_off(model: torch.nn.Module) -> bool:
    """Sets every dropout probability and the jitter of every router to 0: in a model's layers and, for
    dropout, in its configuration, which some layers read in each pass; `save` restores the configuration.
    Returns whether any was above 0."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout))
            is_random = is_dropout or name in _JITTER
            if is_random and isinstance(value, float) and value > 0.0:
                setattr(module, name, 0.0)
                found = True
    for config in _configs_of(model):
        fields = [name for name in vars(config) if "drop" in name and not name.startswith(_OTHER_HEADS)]
        above = {
            name: own for name in fields if isinstance(own := getattr(config, name), float) and own > 0.0
        }
        if above:
            config.accrue_dropout = above
            for name in above:
                setattr(config, name, 0.0)
            found = True
    return found


def restore_dropout(model: torch.nn.Module) -> None:
    """Restores in a model's configurations what `turn_dropout_off` has changed."""
    for config in _configs_of(model):
        for name, value in getattr(config, "accrue_dropout", {}).items():
            setattr(config, name, value)
        vars(config).pop("accrue_dropout", None)


_JITTER = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Attributes of routers that say how much noise they add in training. (PhiMoE's `router_jitter_noise` is a
threshold, also in evaluation.)"""

_OTHER_HEADS = ("summary_", "classifier", "cls_")
"""How the names of fields begin that concern only heads of models for classification."""


def _configs_of(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """The configurations of a model and its layers, with those inside of them."""
    waiting = [each for module in model.modules() for each in vars(module).values()]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, PreTrainedConfig) and id(each) not in found:
            found[id(each)] = each
            waiting += vars(each).values()
    return list(found.values())
