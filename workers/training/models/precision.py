"""Precisions of a model: autocast, narrower frozen layers, a copy in fp64, and the errors of rounding."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from app.contract.spec import RunPrecision
from workers.training.devices.host_memory import available_on_host
from workers.training.models.adapters import adapted_through_their_weights

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


TOLERANCE = {"fp32": 1e-5, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2, "pure_bf16": 2e-2}
"""The allowed relative difference between two ways to compute the same value, by precision."""


def autocast(precision: RunPrecision, device: str, *, keeps_copies: bool = True) -> Any:
    """The context of a forward pass in a precision.

    Args:
        keeps_copies: whether weights that were converted are kept until the context ends, in case they are
            used again. With gradient checkpointing, the backward pass converts them once more anyway, and the
            copies of all layers would take two bytes for each parameter at the peak.
    """
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=AUTOCAST[precision], cache_enabled=keeps_copies)


@contextlib.contextmanager
def copies_kept() -> Iterator[None]:
    """Within the block, autocast keeps copies of the weights that it converts, until its context ends: for a
    weight that is used several times in a pass."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def narrow_frozen_layers(model: Any, dtype: torch.dtype) -> None:
    """Converts frozen linear layers to autocast's precision, to which autocast would convert them on each
    use. This gives the same numbers with half the memory. Weights that layers share, as an output head and
    the embedding do, are not converted."""
    from transformers.pytorch_utils import Conv1D

    through_weights = adapted_through_their_weights(model)
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        plain = isinstance(module, (torch.nn.Linear, Conv1D)) and all(p.is_floating_point() for p in own)
        plain = plain and id(module) not in through_weights
        if plain and own and not any(p.requires_grad or owners[id(p)] > 1 for p in own):
            module.to(dtype)


def has_low_precision_weights(model: torch.nn.Module) -> bool:
    """Whether some weights have fewer than 32 bits."""
    return any(
        weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
        for weight in model.parameters()
    )


def copy_in_fp64(model: Any) -> Any:
    """A copy of a model on the host, in fp64; it takes no memory of a GPU.

    Raises:
        RuntimeError, TypeError, MemoryError: it cannot be copied or converted, or memory is insufficient.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(not each.is_floating_point() for each in model.parameters()):
        raise TypeError("the weights are quantized")
    if 8.5 * sum(each.numel() for each in tensors) > available_on_host():
        raise MemoryError
    replaced: dict[int, Any] = {}
    for each in tensors:
        own = each.detach().to("cpu", torch.float64 if each.is_floating_point() else None, copy=True)
        is_parameter = isinstance(each, torch.nn.Parameter)
        replaced[id(each)] = torch.nn.Parameter(own, each.requires_grad) if is_parameter else own
    copied = copy.deepcopy(model, replaced).to("cpu", torch.float64)
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # grouped products have no fp64
    for module in copied.modules():
        module._compiled_call_impl = None
    return copied
