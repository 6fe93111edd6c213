"""Joins and takes apart the caches of keys and values of several sequences, as rows of one cache.

Rows end together: shorter ones are padded on the left. A layer with a sliding window keeps only the end of
each row, so that it is padded or cut to the window. The state of a linear layer has no length, and is joined
as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_FULL = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_LINEAR = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def can_be_joined(cache: Any) -> bool:
    """Whether every layer of a cache is of a kind that is known here."""
    layers = getattr(cache, "layers", None)
    return isinstance(layers, list) and bool(layers) and all(_is_known(layer) for layer in layers)


def _is_known(layer: Any) -> bool:
    if type(layer) in _LINEAR and not isinstance(layer.conv_states, dict):
        return False
    return type(layer) in {*_FULL, *_SLIDING, *_LINEAR}


def bytes_per_token(cache: Any) -> float:
    """The bytes that one more token of one row takes in a cache that has some tokens."""
    found = 0.0
    for layer in cache.layers:
        if _has_keys(layer) and type(layer) in _FULL:
            rows, columns = layer.keys.shape[0], layer.keys.shape[-2]
            found += (layer.keys.nbytes + layer.values.nbytes) / (rows * max(1, columns))
    return found


def join(cache: Any, other: Any, columns: int, other_columns: int) -> None:
    """Adds the rows of another cache to a cache.

    Args:
        columns: the tokens that each row of `cache` has, padding included.
        other_columns: the same for `other`.
    """
    longest = max(columns, other_columns)
    for own, added in zip(cache.layers, other.layers, strict=True):
        if _has_keys(own):
            size = longest if type(own) in _FULL else min(longest, own.sliding_window - 1)
            own.keys = torch.cat([_padded(own.keys, size), _padded(added.keys, size)])
            own.values = torch.cat([_padded(own.values, size), _padded(added.values, size)])
            if type(own) in _SLIDING:
                own.cumulative_length = longest
        if type(own) in _LINEAR:
            _join_states(own.conv_states, added.conv_states)
            _join_states(own.recurrent_states, added.recurrent_states)


def repeat(cache: Any, times: int) -> None:
    """Repeats the only row of a cache."""
    if times > 1:
        _select(cache, torch.zeros(times, dtype=torch.long), 0)


def keep(cache: Any, rows: Sequence[int], columns: int, padding: int) -> None:
    """Keeps only some rows of a cache, and drops columns on the left that are padding in all of them.

    Args:
        columns: the tokens that each row has, padding included.
        padding: how many columns to drop.
    """
    _select(cache, torch.tensor(rows, dtype=torch.long), padding)
    for layer in cache.layers:
        if type(layer) in _SLIDING and _has_keys(layer):
            layer.cumulative_length = columns - padding


def _select(cache: Any, rows: Tensor, padding: int) -> None:
    for layer in cache.layers:
        if _has_keys(layer):
            chosen = rows.to(layer.keys.device)
            columns = layer.keys.shape[-2]
            dropped = padding
            if type(layer) in _SLIDING:  # of which only the last columns are kept
                dropped = max(0, columns - max(0, layer.cumulative_length - padding))
            layer.keys = layer.keys[chosen][..., dropped:, :].contiguous()
            layer.values = layer.values[chosen][..., dropped:, :].contiguous()
        if type(layer) in _LINEAR:
            for states in (layer.conv_states, layer.recurrent_states):
                for number, state in _each(states):
                    states[number] = state[rows.to(state.device)]


def _has_keys(layer: Any) -> bool:
    """Whether a layer has keys and values: some share those of another layer."""
    keys = getattr(layer, "keys", None)
    return isinstance(keys, Tensor) and keys.dim() == 4


def _padded(states: Tensor, columns: int) -> Tensor:
    """Keys or values of shape [rows, heads, columns, width], padded with zeros, or cut, on the left to this
    number of columns."""
    missing = columns - states.shape[-2]
    if missing < 0:
        return states[..., -missing:, :]
    return torch.nn.functional.pad(states, (0, 0, missing, 0))


def _join_states(states: dict[int, Any], others: dict[int, Any]) -> None:
    for number, state in _each(states):
        states[number] = torch.cat([state, others[number]])


def _each(states: dict[int, Any]) -> list[tuple[int, Tensor]]:
    """The states that a linear layer has, with their places."""
    return [(number, state) for number, state in states.items() if isinstance(state, Tensor)]
