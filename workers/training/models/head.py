"""The output head: how it turns hidden states into logits, and a check that the model does nothing else to
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.contract.loss_chunks import rows_of_chunk
from workers.training.models.precision import copies_kept


@dataclass(frozen=True)
class Head:
    """How logits come from hidden states: cap × tanh(scale × (hidden · weightᵀ + bias) / cap)."""

    layer: nn.Linear
    scale: float
    cap: float | None
    device: Literal["cpu", "cuda"] | None = None
    """The kind of device whose chunks are used; None: that of the weight."""

    @property
    def weight(self) -> Tensor:
        """The layer's current weight; sharding replaces it during a forward pass."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    @property
    def rows(self) -> int:
        """Positions in a chunk."""
        kind = self.device or ("cpu" if self.weight.device.type == "cpu" else "cuda")
        return rows_of_chunk(self.weight.shape[0], kind)

    @property
    def is_plain(self) -> bool:
        """Whether logits are hidden states times weights, but for a bias."""
        return self.scale == 1.0 and self.cap is None

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states, at least fp32; used only where no gradient is needed. With weights in
        fp32, they are the only tensor of their size."""
        with copies_kept():  # the chunks of a pass share one
            found = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).detach()
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        if self.scale != 1.0:
            found.mul_(self.scale)
        return found if self.cap is None else found.div_(self.cap).tanh_().mul_(self.cap)

    def starts(self, positions: int) -> Sequence[int]:
        """Where each chunk begins."""
        return range(0, positions, self.rows)


def backbone_of(model: Any) -> Any:
    """The part of a causal language model that computes hidden states, including its adapters."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.base_model


def head_of(model: Any) -> Head | None:
    """The output head, if it is a plain linear layer; None if only the model itself can compute its logits.

    It includes Gemma 2's soft-capping, Cohere's factor and Granite's divisor. A check before training
    (`head_error`) ensures that nothing else happens to the logits.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    output = inner.get_output_embeddings()
    if type(output) is not nn.Linear or inner.base_model is inner:
        return None
    config = inner.config.get_text_config()
    found = [[getattr(config, name, None) or None for name in names] for names in (_SCALES, _DIVISORS, _CAPS)]
    numbers = [[each for each in named if each is not None] for named in found]
    if not all(isinstance(each, (int, float)) for named in numbers for each in named):
        return None
    scales, divisors, caps = numbers
    if len(caps) > 1:
        return None
    return Head(
        output, prod(map(float, scales)) / prod(map(float, divisors)), float(caps[0]) if caps else None
    )


_SCALES = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of configs by which logits are multiplied, divided, and capped."""

_PROBED_LOGITS = 64.0
"""About the largest logit with which a head is probed: soft caps of 15 to 50 change it."""


@torch.no_grad()
def head_error(model: Any, head: Head, input_ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The largest difference between the logits of a head and those of the model itself, relative to the
    largest logit; a scalar in fp32, infinite if they are not finite.

    At each position, the hidden state is replaced by one that has a single entry, which is a power of two.
    So each logit is a weight times that number, exactly in every precision; any difference comes from what
    else happens to hidden states or logits.

    Args:
        input_ids: of shape (rows, sequence).
        arguments: of the model's forward pass.
    """
    columns = head.weight.shape[1]
    entries = torch.arange(input_ids.numel(), device=input_ids.device) % columns
    largest = head.weight.detach()[:, entries.unique()].abs().max().float().clamp(min=1e-6)
    size = torch.exp2(torch.floor(torch.log2(_PROBED_LOGITS / abs(head.scale) / largest)))
    states: list[Tensor] = []

    def replace(_module: Any, _given: Any, output: Any) -> Any:
        hidden = output[0]
        probe = torch.zeros_like(hidden).flatten(0, -2)
        probe[torch.arange(len(entries), device=probe.device), entries] = size.to(hidden.dtype)
        states.append(probe)
        replaced = probe.view_as(hidden)
        if isinstance(output, tuple):
            return (replaced, *output[1:])
        output["last_hidden_state"] = replaced
        return output

    backbone = backbone_of(model)
    # Some models call only the decoder within their backbone.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    replaced = {part for part in (backbone, decoder) if isinstance(part, nn.Module) and part is not inner}
    handles = [part.register_forward_hook(replace) for part in replaced]
    compiled = backbone._compiled_call_impl
    backbone._compiled_call_impl = None  # which would be compiled again for the hook
    try:
        own: Tensor = model(input_ids=input_ids, **arguments).logits.flatten(0, 1).float()
    finally:
        for handle in handles:
            handle.remove()
        backbone._compiled_call_impl = compiled
    computed = head.logits(states[0]).float()
    if own.shape != computed.shape:
        return own.new_full((), torch.inf)
    error: Tensor = (own - computed).abs().max() / computed.abs().max().clamp(min=1e-6)
    return torch.nan_to_num(error, nan=torch.inf)
