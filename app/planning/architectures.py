"""Sizes of an architecture from its config.json, with its parameter count, without building it.

Families of which many models are planned without a worker (those of the catalogue) have a rule of their own,
which counts exactly; all others are estimated from the usual names of sizes (estimated_sizes.py).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.contract.architecture import Architecture
from app.planning.catalogue import config_of
from app.planning.config_defaults import completed
from app.planning.estimated_sizes import estimated, text_part
from app.planning.families import why_not_causal
from app.planning.parameter_count import MOST_LAYERS

_LONGEST_LIST = 10_000


class UnknownArchitecture(ValueError):
    """A config.json of something other than a supported causal language model."""


def named(name: str) -> Architecture | None:
    """The catalogue's architecture of that name, if it has one."""
    config = config_of(name)
    return from_config(config) if config else None


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Sizes and parameter count from the content of a config.json. For families without a rule of their own,
    they are estimates.

    Raises:
        UnknownArchitecture: it is no causal language model, or sizes are missing or not numbers.
    """
    why_not = why_not_causal(config)
    if why_not is not None:
        raise UnknownArchitecture(why_not)
    family, text = str(config["model_type"]), text_part(config)
    reader = _READERS.get(family, estimated)
    for part in (config, text):
        _check_sizes(part)
        _check_names_agree(part, _SYNONYMS if family in _READERS else _SYNONYMS_EVERYWHERE)
    try:
        architecture = reader(completed(config)).model_copy(update={"fingerprint": fingerprint_of(config)})
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UnknownArchitecture(f"config.json of family {family}: {_problem(error)}") from None
    for name, most in _LIMITS.items():
        if not 1 <= getattr(architecture, name) <= most:
            raise UnknownArchitecture(f"config.json of family {family}: {name} must be from 1 to {most:,}")
    return architecture


def _problem(error: Exception) -> str:
    if isinstance(error, KeyError):
        what = str(error.args[0])[:200]
        return what if what.startswith("no ") else f"the field {what!r} is missing"
    if isinstance(error, TypeError):
        return "a size is null, or not a number"
    return repr(str(error)[:100])


_LARGEST_NUMBER = 2**31
_LONGEST_NUMBER = 10
"""The most digits of a number that is given as text."""
_LIMITS = {
    "layers": MOST_LAYERS, "hidden_size": 2**17, "heads": 4_096, "key_value_heads": 4_096, "head_dim": 2**14,
    "intermediate_size": 2**20, "vocabulary": 2**22, "positions": 2**31, "experts": 4_096,
    "active_experts": 4_096, "parameters": 10**14,
}  # fmt: skip
"""Upper limits, several times those of the largest known model; larger numbers are rejected as malicious."""


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Rejects implausible numbers before anything is computed with them.

    Raises:
        UnknownArchitecture: a number is beyond any real size, or a list is too long.
    """
    for name, value in config.items():
        if isinstance(value, str) and len(value) > _LONGEST_NUMBER and value.strip("+- _").isdigit():
            raise UnknownArchitecture(f"{name[:50]} in config.json is larger than {_LARGEST_NUMBER:,}")
        if isinstance(value, (int, float)) and not abs(value) <= _LARGEST_NUMBER:
            if name in ("model_max_length", "max_position_embeddings", "n_positions"):
                continue  # some use a huge number for "unlimited"; checked below
            what = f"larger than {_LARGEST_NUMBER:,}" if value == value else "not a number (NaN)"
            raise UnknownArchitecture(f"{name[:50]} in config.json is {what}")
        if isinstance(value, list) and len(value) > _LONGEST_LIST:
            raise UnknownArchitecture(f"{name[:50]} of config.json has more than {_LONGEST_LIST} members")


_SYNONYMS = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    ("max_position_embeddings", "n_positions"),
    ("num_local_experts", "num_experts", "n_routed_experts"),
)
"""Names of the same size in different families; transformers treats some of them as one field
(`attribute_map`)."""


_SYNONYMS_EVERYWHERE = (("num_hidden_layers", "n_layer", "n_layers"), ("hidden_size", "n_embd", "n_embed"))
"""Those that are synonyms in every family."""


def _check_names_agree(config: Mapping[str, Any], synonyms: Iterable[Sequence[str]]) -> None:
    """Rejects a config that gives one size under two names with different values: the model that is built
    may not be the one that is planned for.

    Raises:
        UnknownArchitecture: it does.
    """
    for names in synonyms:
        given = {name: config[name] for name in names if config.get(name) is not None}
        if len({str(value) for value in given.values()}) > 1:
            both = " and ".join(f"{name} {str(value)[:20]}" for name, value in given.items())
            raise UnknownArchitecture(
                f"config.json gives two values for the same size ({both}): correct the wrong one"
            )


_IGNORED_FIELDS = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip


FAMILIES_BUILT_AS_SAVED = frozenset(
    ("dots3_note", "emu3", "llama4", "mllama", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
)
"""Families of which `architectures` decides whether a model has towers for images."""


def relevant_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the fields that affect neither shapes nor memory. Whatever is stored under a
    fingerprint must depend on these fields only: configs of several keys may share one."""
    found = {name: value for name, value in config.items() if name not in _IGNORED_FIELDS}
    saved_as = config.get("architectures")
    if config.get("model_type") in FAMILIES_BUILT_AS_SAVED and isinstance(saved_as, list):
        found["architectures"] = saved_as[:1]
    return found


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """A short digest of a config.json's relevant fields."""
    relevant = json.dumps(relevant_fields(config), sort_keys=True, default=str)
    return hashlib.sha256(relevant.encode()).hexdigest()[:16]


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
    family, layers = str(config["model_type"]), int(config["num_hidden_layers"])
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * head_dim, key_value_heads * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    if family == "qwen2":
        attention += queries + 2 * keys
    elif family not in _WITHOUT_BIASES and config.get("attention_bias", False):
        attention += queries + 2 * keys + hidden
    if family in {"qwen3", "qwen3_moe", "gemma3_text"}:
        attention += 2 * head_dim  # the norms of queries and keys
    norms = 4 if family in {"gemma2", "gemma3_text"} else 2
    experts, active, own, routed = _experts(config, family, layers)
    bias = (2 * inner + hidden) if family == "llama" and config.get("mlp_bias", False) else 0
    dense = 3 * hidden * inner + bias
    mixed = experts * 3 * hidden * own + hidden * experts  # and the router
    tied = config.get("tie_word_embeddings", family in {"gemma", "gemma2", "gemma3_text"})
    embeddings = vocabulary * hidden * (1 if tied else 2)
    blocks = layers * (attention + norms * hidden) + routed * mixed + (layers - routed) * dense
    return Architecture(
        family=family, layers=layers, hidden_size=hidden, heads=heads, key_value_heads=key_value_heads,
        head_dim=head_dim, intermediate_size=own if routed else inner, vocabulary=vocabulary,
        positions=int(config.get("max_position_embeddings") or config["max_sequence_length"]),
        gated=True, experts=experts, active_experts=active,
        parameters=embeddings + blocks + hidden,
    )  # fmt: skip


def _experts(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, int, int, int]:
    """Counts of experts and active experts, an expert's width, and the number of layers with experts."""
    if family == "mixtral":
        experts, taken = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
        return experts, taken, int(config["intermediate_size"]), layers
    if family == "qwen3_moe":
        experts = int(config.get("num_experts") or config["num_local_experts"])
        taken = int(config["num_experts_per_tok"])
        step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
        if not 1 <= layers <= MOST_LAYERS:  # the loop below visits each layer
            raise ValueError(f"num_hidden_layers must be from 1 to {MOST_LAYERS:,}")
        alone = {layer for layer in dense if isinstance(layer, int)}
        routed = sum(layer not in alone and (layer + 1) % step == 0 for layer in range(layers))
        return experts, taken, int(config["moe_intermediate_size"]), routed
    return 1, 1, 0, 0


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


def _gpt_neox(config: Mapping[str, Any]) -> Architecture:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    vocabulary = int(config["vocab_size"])
    bias = 4 * hidden if config.get("attention_bias", True) else 0
    block = 4 * hidden * hidden + bias + 2 * hidden * inner + inner + hidden + 4 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return Architecture(
        family="gpt_neox", layers=layers, hidden_size=hidden, heads=heads, key_value_heads=heads,
        head_dim=hidden // heads, intermediate_size=inner, vocabulary=vocabulary,
        positions=int(config["max_position_embeddings"]), gated=False,
        parameters=embeddings + layers * block + 2 * hidden,
    )  # fmt: skip


def _bloom(config: Mapping[str, Any]) -> Architecture:
    """Positions are those of pre-training: ALiBi itself has no limit."""
    layers, hidden = int(config["n_layer"]), int(config.get("hidden_size") or config["n_embed"])
    heads, vocabulary = int(config.get("n_head") or config["num_attention_heads"]), int(config["vocab_size"])
    block = 12 * hidden * hidden + 9 * hidden + 4 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return Architecture(
        family="bloom", layers=layers, hidden_size=hidden, heads=heads, key_value_heads=heads,
        head_dim=hidden // heads, intermediate_size=4 * hidden, vocabulary=vocabulary,
        positions=int(config.get("seq_length") or 2048), gated=False,
        parameters=embeddings + layers * block + 4 * hidden,
    )  # fmt: skip


def _falcon(config: Mapping[str, Any]) -> Architecture:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
    inner, head_dim = int(config.get("ffn_hidden_size") or 4 * hidden), hidden // heads
    grouped = bool(config.get("new_decoder_architecture", False))
    if grouped:
        key_value_heads = int(config.get("num_kv_heads") or heads)
    else:
        key_value_heads = 1 if config.get("multi_query", True) else heads
    projected = hidden + 2 * key_value_heads * head_dim
    norms = int(config.get("num_ln_in_parallel_attn") or (2 if grouped else 1))
    if not grouped and not config.get("parallel_attn", True):
        norms = 2
    bias = projected + hidden + inner + hidden if config.get("bias", False) else 0
    block = hidden * projected + hidden * hidden + 2 * hidden * inner + bias + norms * 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return Architecture(
        family="falcon", layers=layers, hidden_size=hidden, heads=heads, key_value_heads=key_value_heads,
        head_dim=head_dim, intermediate_size=inner, vocabulary=vocabulary,
        positions=int(config.get("max_position_embeddings") or 2048), gated=False,
        parameters=embeddings + layers * block + 2 * hidden,
    )  # fmt: skip


_WITHOUT_BIASES = ("mistral", "mixtral", "phi3")
"""Families whose attention has no biases, whatever `attention_bias` says."""

_LIKE_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "mixtral",
)  # fmt: skip

_READERS = {
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "falcon": _falcon,
    **dict.fromkeys(_LIKE_LLAMA, _llama),
}
