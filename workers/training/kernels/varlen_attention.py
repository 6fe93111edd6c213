"""Attention over packed rows, sample by sample.

PyTorch's `scaled_dot_product_attention` keeps the samples of a packed row apart by a mask. Its memory and its
time grow with the square of the row's length. On a GPU, PyTorch's flash kernel can instead be given the
places where samples begin (Dao 2023, arXiv:2307.08691, section 3.1), just like flash-attn's. On a CPU,
samples of similar length are padded to one batch for attention alone (sample_groups.py): short ones take two
plain matrix products, the others `scaled_dot_product_attention`. This module offers that to transformers as
an implementation of attention.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from workers.training.kernels.sample_groups import groups_of, pad, unpad

NAME = "accrue_varlen"
"""The implementation's name in transformers."""

_CAUSAL_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers whose attention is plainly causal, as long as a sample is not longer than the window."""

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")

_SHORT = 128
"""The most tokens of the longest sample of a group that counts as short on a CPU."""

_SHORT_BY_WIDTH = 2
"""The same, relative to the width of a head: the scores of a short sample are kept for the backward pass, and
would need much memory beside narrow heads."""

_PRECISE = (torch.float32, torch.float64)
"""Precisions in which plain products of matrices are as accurate as the kernel, which adds in fp32 even in
bf16 and fp16."""

_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8
"""What the kernel supports."""


def suits(config: Any, longest: int) -> bool:
    """Whether the attention of all layers of a model is plainly causal within samples, without dropout as far
    as the config says.

    Args:
        config: the model's config.
        longest: tokens of the longest sample.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if not all(isinstance(kind, str) and kind in _CAUSAL_LAYERS for kind in kinds):
        return False
    if getattr(text, "attention_chunk_size", None) or getattr(text, "attn_logit_softcapping", None):
        return False
    if any(getattr(text, name, None) for name in _DROPOUTS):
        return False
    window = getattr(text, "sliding_window", None)
    return window is None or (isinstance(window, int) and longest <= window)


def register() -> None:
    """Makes transformers know the implementation. It gets no masks, since it has no mask function."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a packed row; of each row, if they are not packed.

    Args:
        query: of shape (rows, heads, sequence, width); `key` and `value` may have fewer heads.
        cu_seq_lens_q: where samples begin, and where the last one ends, int32; None if rows are not packed.
        max_length_q: tokens of the longest sample.

    Returns:
        The states, of shape (rows, sequence, heads, width).

    Raises:
        NotImplementedError: the model's attention needs more than this (a mask, a soft cap, attention sinks,
            a position bias), is not causal, or has heads of a width that the kernel does not support.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if attention_mask is not None or unknown or getattr(module, "is_causal", True) is False:
        raise NotImplementedError(f"attention with {', '.join(unknown) or 'a mask of its own'}")
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        states, _ = sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=True
        )
        return states, None
    if query.is_cuda and not is_supported(query):
        raise NotImplementedError("attention with heads of this width")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    return within_samples(query, key, value, cu_seq_lens_q, max_length_q, scaling, dropout).unsqueeze(0), None


def is_supported(query: Tensor) -> bool:
    """Whether the kernel supports the width of the heads."""
    width = query.shape[-1]
    return width <= _WIDEST_HEAD and width % _HEAD_MULTIPLE == 0


def within_samples(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    longest: int,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each sample.

    Args:
        query: of shape (tokens, heads, width); `key` and `value` may have fewer heads.
        begins: where samples begin, and where the last one ends, int32.
    """
    if not query.is_cuda:
        return _in_groups(query, key, value, begins, scaling, dropout)
    states: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, begins, begins, longest, longest, dropout, True, False, scale=scaling
    )[0]
    return states


def _in_groups(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    """`within_samples` by a call for each group of samples of similar length."""
    groups = groups_of(begins)
    shared = query.shape[1] // key.shape[1]
    found = []
    for queries, keys, values in zip(*(pad(states, groups) for states in (query, key, value)), strict=True):
        if shared > 1:
            keys, values = (states.repeat_interleave(shared, dim=1) for states in (keys, values))
        if _are_short(queries) and not dropout:
            found.append(_of_short_samples(queries, keys, values, scaling))
        else:
            found.append(
                F.scaled_dot_product_attention(
                    queries, keys, values, dropout_p=dropout, is_causal=True, scale=scaling
                )
            )
    return unpad(found, groups)


def _are_short(query: Tensor) -> bool:
    """Whether padded samples, of shape (samples, heads, longest, width), take the way of short ones."""
    longest, width = query.shape[2:]
    return longest <= min(_SHORT, _SHORT_BY_WIDTH * width) and query.dtype in _PRECISE


def _of_short_samples(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention by two products of matrices. For short samples, this is faster on a CPU than the
    kernel that divides them into blocks."""
    rows, heads, length, width = query.shape
    future = torch.full((length, length), -torch.inf, dtype=query.dtype).triu(1)
    query, key, value = (states.flatten(0, 1) for states in (query, key, value))
    factor = width**-0.5 if scaling is None else scaling
    scores = torch.baddbmm(future.expand(rows * heads, -1, -1), query, key.transpose(1, 2), alpha=factor)
    return torch.bmm(scores.softmax(-1), value).view(rows, heads, length, -1)
