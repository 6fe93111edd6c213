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


_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def _adapters_of(weights: Collection[torch.nn.Parameter], model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The adapters that are added to these weights. Experts have several weights, each with its own."""
    chosen, found = set(map(id, weights)), []
    module: Any
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
            name = getattr(module, "parameter_name", "weight")  # of experts; other layers have one
            if id(getattr(module.get_base_layer(), name, None)) in chosen:
                for part in _ADAPTERS:
                    found += list(getattr(module, part, torch.nn.ModuleDict()).parameters())
    return found


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
        matched = [parameters[name] for name in names]
        for parameter in (*matched, *_adapters_of(matched, model)):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise CannotTrain(
            "freeze", "freeze matches all parameters, so nothing would be trained: remove some patterns"
        )
