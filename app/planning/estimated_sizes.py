"""Sizes of any causal language model, estimated from the usual fields of its config.json.

Families name the same size differently, and differ in details that no field tells. So the result is an
estimate: the exact number of parameters comes from the model itself, once a worker has built it without
weights (app/memory_profiles/profiles.py: `with_exact_parameter_count`).
"""

import math
from collections.abc import Mapping
from typing import Any

from app.contract.architecture import Architecture
from app.planning.parameter_count import Widths, in_embeddings, in_layers, in_towers

UNLIMITED_POSITIONS = 2**20
"""The longest sequence of a model whose config names none: ALiBi and state spaces have no limit."""

TEXT_CONFIGS = ("text_config", "language_config", "llm_config", "decoder", "thinker_config")
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip
_KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Each layer's kind, from which some families count their layers."""
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "embedding_dim", "emb_dim")
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "encoder_attention_heads", "attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_groups", "multi_query_group_num")
_INNER = (
    "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "d_ff", "dff",
    "dim_ff", "block_ff_dim",
)  # fmt: skip
_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_target_positions",
)  # fmt: skip
SIZE_NAMES = (
    (*LAYER_COUNTS, *_KINDS), _HIDDEN, _HEADS, _KEY_VALUE_HEADS, ("head_dim",), _INNER, ("vocab_size",),
    _POSITIONS,
)  # fmt: skip
"""The names of each size that every family has."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
    "num_selected_experts", "experts_per_token",
)  # fmt: skip
_EXPERT_WIDTH = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_hidden_size",
)  # fmt: skip
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_UNGATED = frozenset(
    """
    apertus arcee bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small
    camembert codegen ctrl data2vec-text electra ernie fuyu git gpt-sw3 gpt_bigcode gpt_neo gpt_neox_japanese
    gptj jais2 marian mbart megatron-bert mpt mvp nanochat nemotron nemotron_h openai-gpt pegasus persimmon
    phi plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer rwkv starcoder2 trocr whisper
    xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """.split()  # noqa: SIM905
)
"""Families whose feed-forward has two matrices; in most others, it has a gate."""

TIED = "tie_word_embeddings"
"""The field that says whether the output head is the embedding."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: all of it, unless there are several towers."""
    for name in TEXT_CONFIGS:
        part = config.get(name)
        if isinstance(part, Mapping) and _first(part, LAYER_COUNTS) is not None:
            return part
    return config


def estimated(config: Mapping[str, Any]) -> Architecture:
    """Sizes and an estimated parameter count.

    Raises:
        KeyError: the config names no number of layers, no width or no vocabulary.
        TypeError, ValueError: a size is not a number.
    """
    family, text = str(config["model_type"]), _flat(text_part(config))
    by_layer = _first(text, _KINDS)
    layers = len(by_layer) if by_layer and _first(text, LAYER_COUNTS) is None else 0
    layers, hidden = layers or _required(text, "layers", LAYER_COUNTS), _required(text, "width", _HIDDEN)
    vocabulary = int(text.get("vocab_size") or config["vocab_size"])
    heads = _largest(_first(text, _HEADS)) or 1
    key_value_heads = _largest(_first(text, _KEY_VALUE_HEADS)) or heads
    if family == "gpt_bigcode" and text.get("multi_query", True):
        key_value_heads = 1
    head_dim = _largest(text.get("head_dim")) or max(1, hidden // heads)
    inner = _inner(family, text, hidden)
    experts = 1 if text.get("is_moe") is False else _largest(_first(text, _EXPERTS)) or 1
    active = _largest(_first(text, _ACTIVE)) or 1
    width = (_largest(_first(text, _EXPERT_WIDTH)) or inner) if experts > 1 else inner
    gated = family not in _UNGATED
    widths = Widths(
        layers=layers, hidden=hidden, heads=heads, key_value_heads=key_value_heads, head_dim=head_dim,
        inner=_largest(text.get("intermediate_size_mlp")) or inner, experts=experts, expert_inner=width,
        shared_experts=_largest(_first(text, _SHARED_EXPERTS)), matrices=3 if gated else 2,
    )  # fmt: skip
    tied = bool(text.get(TIED, config.get(TIED, False)))
    return Architecture(
        family=family, layers=layers, hidden_size=hidden, heads=heads, key_value_heads=key_value_heads,
        head_dim=head_dim, intermediate_size=width, vocabulary=vocabulary,
        positions=_positions(family, text), gated=gated, experts=experts,
        active_experts=min(active, experts),
        parameters=(
            in_embeddings(family, text, hidden, vocabulary, layers, tied)
            + in_layers(family, text, widths) + hidden + in_towers(family, config)
        ),
        is_estimated=True,
    )  # fmt: skip


def _flat(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with the sizes that DBRX keeps in configs of their own for attention and experts."""
    own = {"attn_config": {"kv_n_heads": "num_key_value_heads"}, "ffn_config": {
        "ffn_hidden_size": "intermediate_size", "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
    }}  # fmt: skip
    found = dict(text)
    for part, names in own.items():
        inner = text.get(part)
        if isinstance(inner, Mapping):
            found |= {name: inner[theirs] for theirs, name in names.items() if theirs in inner}
    return found


def _inner(family: str, text: Mapping[str, Any], hidden: int) -> int:
    """The width inside of a feed-forward without experts."""
    inner = _largest(_first(text, _INNER)) or 4 * hidden
    if text.get("block_auto_adjust_ff_dim"):  # LFM2
        step = _largest(text.get("block_multiple_of")) or 1
        inner = int(float(text.get("block_ffn_dim_multiplier") or 1) * int(2 * inner / 3))
        return math.ceil(inner / step) * step
    if text.get("ffn_proj_factor"):  # xLSTM
        step = _largest(text.get("ffn_round_up_to_multiple_of")) or 1
        return math.ceil(float(text["ffn_proj_factor"]) * hidden / step) * step
    if family in ("recurrent_gemma", "moshi"):
        return max(1, inner // 2)  # the config counts the gate's half, too
    if not _largest(_first(text, _EXPERTS)):  # Granite 4 without experts has the shared one only
        return _largest(text.get("shared_intermediate_size")) or inner
    return inner


_COUNTED_AFTER_PADDING = {
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Families whose positions begin after the id of the padding token (fairseq's convention)."""


def _positions(family: str, text: Mapping[str, Any]) -> int:
    """The longest sequence, in tokens."""
    positions = _largest(_first(text, _POSITIONS)) or UNLIMITED_POSITIONS
    if family in _COUNTED_AFTER_PADDING:
        positions -= int(text.get("pad_token_id", 1) or 0) + 1
    return max(1, positions)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _required(config: Mapping[str, Any], size: str, names: tuple[str, ...]) -> int:
    found = _largest(_first(config, names))
    if not found:
        raise KeyError(f"no {size}: one of {', '.join(names)}")
    return found


def _largest(value: Any) -> int:
    """A size as a number; of one that differs by layer, the largest. 0 if there is none."""
    if isinstance(value, list):
        return max((int(each) for each in value if each is not None), default=0)
    return int(value or 0)
