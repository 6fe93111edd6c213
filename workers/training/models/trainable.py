"""Makes a loaded model trainable: adapters, gradient checkpointing, frozen parameters, precision."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import torch

from app.contract.model_reference import LoraSpec
from app.contract.spec import RunPrecision
from workers.training.exceptions import CannotTrain
from workers.training.models.adapters import plain_name, with_adapters
from workers.training.models.model_parts import language_model_of, towers_within
from workers.training.models.precision import AUTOCAST, narrow_frozen_layers


def prepare_for_training(
    model: Any,
    *,
    lora: LoraSpec | None,
    seed: int,
    gradient_checkpointing: bool,
    freeze: tuple[str, ...],
    precision: RunPrecision,
    saved: Collection[str] = (),
) -> Any:
    """Prepares a loaded model for training: adapters, gradient checkpointing, frozen parameters, precision.

    Args:
        saved: the names of the values of adapters that are trained further.

    Raises:
        CannotTrain: the adapters cannot be added, the patterns in `freeze` match nothing or everything, or
            the model does not support gradient checkpointing.
    """
    # Padding is on the right, where causal attention ignores it. Checking for it would read from the device.
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    _freeze_towers(model)
    if lora is not None:
        model = with_adapters(model, lora, seed, saved=saved)
    if gradient_checkpointing:
        recompute_activations(model)
    _freeze(model, freeze)
    if precision in AUTOCAST and lora is not None and not lora.merge:
        narrow_frozen_layers(model, AUTOCAST[precision])
    return model.train()


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing: activations are recomputed in the backward pass; the gradient is the same."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # The name since transformers 5.2x; releases before it have only the older one.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise CannotTrain("not_supported", f"gradient_checkpointing: {str(error).splitlines()[0]}") from None


def _freeze_towers(model: Any) -> None:
    """Freezes what does not compute text: towers for images or sound, and what connects them."""
    text = language_model_of(model)
    for tower in towers_within(text):
        tower.requires_grad_(False)
    if text is model:
        return
    trained = set(text.parameters())
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        trained.update(layer.parameters() if isinstance(layer, torch.nn.Module) else ())
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


def _adapters_of(weights: Collection[str], parameters: Collection[str]) -> list[str]:
    """The adapters of the layers that have these weights, by name; a bias is no reason to freeze them."""
    layers = {
        plain_name(name.partition(".base_layer.")[0])
        for name in weights
        if ".base_layer." in name and not name.endswith(".bias")
    }
    return [
        name for name in parameters if ".lora_" in name and plain_name(name.partition(".lora_")[0]) in layers
    ]


def _freeze(model: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a shared weight has several names
    for pattern in patterns:
        names = [
            name
            for name in parameters
            if fnmatchcase(name, pattern) or fnmatchcase(plain_name(name), pattern)
        ]
        if not names:
            plain = list(dict.fromkeys(map(plain_name, parameters)))
            raise CannotTrain("freeze", f"freeze: no parameter matches {pattern!r}; the first are "
                              f"{', '.join(plain[:5])}")  # fmt: skip
        for name in [*names, *_adapters_of(names, parameters)]:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise CannotTrain(
            "freeze", "freeze matches all parameters, so nothing would be trained: remove some patterns"
        )
