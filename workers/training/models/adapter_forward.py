"""The forward pass of a LoRA layer with less memory traffic than peft's.

A LoRA layer computes x·Wᵀ + scaling × (x·Aᵀ)·Bᵀ (Hu et al. 2021, arXiv:2106.09685, section 4.1). By
itself, peft writes the second product, multiplies it and adds it to the first, each in a pass over a tensor
as large as the layer's output, and first converts the input to the adapter's precision. A matrix product can
add its result to a matrix instead, multiplied by a number (BLAS's `beta` and `alpha`), and needs the input
as it is.

The result is the same up to rounding.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def add_in_place(adapted: nn.Module) -> None:
    """Lets all plain LoRA layers of a model add their product in place."""
    from peft.tuners.lora.layer import Linear

    for layer in adapted.modules():
        if type(layer) is Linear and _is_plain(layer):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _is_plain(layer: Any) -> bool:
    """Whether peft computes nothing but the formula above for a layer."""
    (name, *others) = layer.lora_A
    return (
        not others
        and not layer.lora_variant
        and layer.lora_B[name].bias is None
        and type(layer.base_layer) in (nn.Linear, Conv1D)
    )


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The layer's output for inputs of shape (…, inputs)."""
    (name,) = layer.lora_A
    if layer.disable_adapters or layer.merged or name not in layer.active_adapters:
        plain: Tensor = type(layer).forward(layer, x)
        return plain
    first, second, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    rows = x.flatten(0, -2)  # so that the product is no view, which autograd copies if it is changed
    found: Tensor = layer.base_layer(rows)
    dropped = layer.lora_dropout[name](rows)
    if torch.is_autocast_enabled(x.device.type) or dropped.dtype == first.weight.dtype:
        low = first(dropped)
    else:
        low = F.linear(dropped, first.weight.to(dropped.dtype))
    found.addmm_(low.to(found.dtype), second.weight.to(found.dtype).t(), alpha=scaling)
    return found.view(*x.shape[:-1], found.shape[-1])
