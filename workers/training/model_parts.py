"""The parts that a model consists of."""

from typing import Any

import torch


def language_model_of(model: Any) -> torch.nn.Module:
    """The part of a model that is a language model: all of it, unless it has towers for images or sound."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = inner.config
    decoder: Any = None
    if config.get_text_config() is not config and hasattr(inner, "get_decoder"):
        decoder = inner.get_decoder()
    whole: torch.nn.Module = inner
    return decoder if isinstance(decoder, torch.nn.Module) else whole


def is_mixture_of_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts, in which rounding can decide near ties."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    return any(
        getattr(config, name, None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )
