"""Sizes that fake tensors do not show: weights in 4 bits and optimizer states in 8."""

import torch
from torch import Tensor, nn

_BLOCK = 64
_SCALES_BLOCK = 256
BYTES_PER_4BIT_WEIGHT = 0.5 + (1 + 4 / _SCALES_BLOCK) / _BLOCK
"""NF4 with double quantisation: half a byte, a scale of 8 bits for each 64 weights, and one of 32 bits for
each 256 of those (Dettmers et al. 2023, section 3)."""

_STATE_BLOCK = 256
_MIN_VALUES_FOR_8BIT = 4096


def to_compute_precision(layers: nn.ModuleList) -> None:
    """Converts linear layers to bf16, the precision of their weights once dequantised."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.bfloat16)


def is_quantised(weight: Tensor, group: int | None) -> bool:
    """Whether QLoRA keeps a weight in 4 bits: the frozen matrices within the layers."""
    return (
        group is not None and weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.requires_grad
    )


def stored_bytes(weight: Tensor) -> int:
    """The bytes of a weight in 4 bits."""
    return int(weight.numel() * BYTES_PER_4BIT_WEIGHT)


def state_bytes(state: Tensor) -> int:
    """The bytes of an 8-bit optimizer's state: one per value, and a 32-bit scale for every 256 values. Small
    states stay in full precision (Dettmers et al. 2022, section 2)."""
    if state.numel() < _MIN_VALUES_FOR_8BIT:
        return state.untyped_storage().nbytes()
    return int(state.numel() * (1 + 4 / _STATE_BLOCK))
