"""Architectures by name and from a config.json, with their parameter counts."""

from collections.abc import Mapping
from typing import Any

from app.schemas.architecture import BUILT_IN_MODEL, Architecture


class UnknownArchitecture(ValueError):
    """A config.json that is not one of a causal language model this can reckon with."""


TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 1024, "vocab_size": 260,
}  # fmt: skip
"""The built-in model: one token per byte, and four special ones."""

_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257}

CATALOGUE: dict[str, dict[str, Any]] = {
    BUILT_IN_MODEL: TINY_GPT2,
    "distilbert/distilgpt2": {**_GPT2, "n_layer": 6, "n_embd": 768, "n_head": 12},
    "openai-community/gpt2": {**_GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "openai-community/gpt2-medium": {**_GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "openai-community/gpt2-large": {**_GPT2, "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "openai-community/gpt2-xl": {**_GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25},
}
"""The fields of the published config.json files that sizes depend on, by hub id."""

ALIASES = {name.split("/")[1]: name for name in CATALOGUE if "gpt2" in name and name != BUILT_IN_MODEL}


def named(name: str) -> Architecture | None:
    """The catalogue's architecture of that name, if it has one."""
    config = CATALOGUE.get(ALIASES.get(name, name))
    return from_config(config) if config else None


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Sizes and parameter count from the content of a config.json.

    Raises:
        UnknownArchitecture: a family without a rule, or sizes that are missing or no numbers.
    """
    family = config.get("model_type")
    reader = _READERS.get(str(family))
    if reader is None:
        raise UnknownArchitecture(f"model_type {family!r} is not one of {', '.join(sorted(_READERS))}")
    try:
        return reader(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnknownArchitecture(f"config.json of family {family}: {error!r}") from None


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    layers, hidden = int(config["n_layer"]), int(config["n_embd"])
    heads, vocabulary = int(config["n_head"]), int(config["vocab_size"])
    positions, inner = int(config["n_positions"]), int(config.get("n_inner") or 4 * hidden)
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = 2 * hidden * inner + inner + hidden
    block = attention + feed_forward + 4 * hidden
    head = 0 if config.get("tie_word_embeddings", True) else vocabulary * hidden
    return Architecture(
        family="gpt2", layers=layers, hidden_size=hidden, heads=heads, key_value_heads=heads,
        head_dim=hidden // heads, intermediate_size=inner, vocabulary=vocabulary, positions=positions,
        gated=False, parameters=(vocabulary + positions) * hidden + layers * block + 2 * hidden + head,
    )  # fmt: skip


def _llama(config: Mapping[str, Any]) -> Architecture:
    """Llama and the families that share its block: grouped heads, gated feed-forward, RMS norms."""
    family, layers, hidden = (
        str(config["model_type"]),
        int(config["num_hidden_layers"]),
        int(config["hidden_size"]),
    )
    heads, inner, vocabulary = (
        int(config[k]) for k in ("num_attention_heads", "intermediate_size", "vocab_size")
    )
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * head_dim, key_value_heads * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    if family == "qwen2":
        attention += queries + 2 * keys
    elif config.get("attention_bias", False):
        attention += queries + 2 * keys + hidden
    if family == "qwen3":
        attention += 2 * head_dim
    bias = (2 * inner + hidden) if config.get("mlp_bias", False) else 0
    experts = int(config["num_local_experts"]) if family == "mixtral" else 1
    router = hidden * experts if family == "mixtral" else 0
    norms = 4 if family == "gemma2" else 2
    block = attention + experts * (3 * hidden * inner + bias) + router + norms * hidden
    tied = config.get("tie_word_embeddings", family in {"gemma", "gemma2"})
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return Architecture(
        family=family, layers=layers, hidden_size=hidden, heads=heads, key_value_heads=key_value_heads,
        head_dim=head_dim, intermediate_size=inner, vocabulary=vocabulary,
        positions=int(config["max_position_embeddings"]), gated=True,
        parameters=embeddings + layers * block + hidden,
    )  # fmt: skip


def _opt(config: Mapping[str, Any]) -> Architecture:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads, inner = int(config["num_attention_heads"]), int(config["ffn_dim"])
    vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
    width = int(config.get("word_embed_proj_dim") or hidden)
    bias = 1 if config.get("enable_bias", True) else 0
    affine = 1 if config.get("layer_norm_elementwise_affine", True) else 0
    block = 4 * hidden * hidden + 2 * hidden * inner + bias * (5 * hidden + inner) + affine * 4 * hidden
    projections = 2 * hidden * width if width != hidden else 0
    final_norm = 2 * hidden * affine if config.get("do_layer_norm_before", True) else 0
    head = 0 if config.get("tie_word_embeddings", True) else vocabulary * width
    # OPT's learned positions start at an offset of 2 rows.
    parameters = (
        vocabulary * width + (positions + 2) * hidden + layers * block + projections + final_norm + head
    )
    return Architecture(
        family="opt", layers=layers, hidden_size=hidden, heads=heads, key_value_heads=heads,
        head_dim=hidden // heads, intermediate_size=inner, vocabulary=vocabulary, positions=positions,
        gated=False, parameters=parameters,
    )  # fmt: skip


_READERS = {
    "gpt2": _gpt2,
    "opt": _opt,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral"), _llama),
}
