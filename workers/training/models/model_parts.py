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


_SENSES = ("vision", "image", "video", "audio", "speech")
"""Beginnings of the names of towers' configurations."""


def towers_within(text: torch.nn.Module) -> list[torch.nn.Module]:
    """The towers for images or sound that some language models (Phi-4 multimodal, GIT) have within them, each
    with all that surrounds it and does not compute text. They are known by their configurations."""
    config: Any = getattr(text, "config", None)
    names = [name for name in getattr(config, "sub_configs", None) or {} if name.startswith(_SENSES)]
    own = {type(getattr(config, name, None)) for name in names} - {type(None)}
    parents = {child: module for module in text.modules() for child in module.children()}
    of_text: set[torch.nn.Module] = {text}
    module = getattr(text, "get_input_embeddings", lambda: None)()
    while module is not None:
        of_text.add(module)
        module = parents.get(module)
    towers: dict[torch.nn.Module, None] = {}
    for tower in text.modules():
        if type(getattr(tower, "config", None)) in own:
            while (above := parents.get(tower)) is not None and above not in of_text:
                tower = above
            towers[tower] = None
    return list(towers)


def embeddings_of(model: Any) -> int | None:
    """The number of tokens that the model has an embedding for; None if that is unknown."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return None if weight is None else len(weight)


def positions_of(model: Any) -> int | None:
    """The number of tokens that the model's context has; None if it has no limit (RWKV) or names none."""
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in _POSITIONS)
    return next((each for each in named if isinstance(each, int) and each > 0), None)


_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def padding_token(tokenizer: Any, model: Any) -> int:
    """The token that fills rows up: the tokenizer's own, or the one that ends texts."""
    most = embeddings_of(model)
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((each for each in known if each is not None and (most is None or each < most)), 0)


def longrope_short_length(model: torch.nn.Module) -> int | None:
    """The length up to which a model with LongRoPE (Ding et al. 2024) scales positions for short texts.
    transformers scales all rows of a micro-batch for long texts if one of them is longer. None: the model
    scales all texts alike."""
    lengths = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        parameters = getattr(config, "rope_parameters", None)
        if not isinstance(parameters, dict):
            continue
        of_layers = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer, kind in of_layers:
            own = parameters if layer is None else parameters.get(layer)
            if kind == "longrope" and isinstance(own, dict):
                lengths.append(own.get("original_max_position_embeddings"))
    return min((length for length in lengths if isinstance(length, int)), default=None)


def is_mixture_of_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts, in which rounding can decide near ties."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    return any(
        getattr(config, name, None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )
