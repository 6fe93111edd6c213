"""The number of a language model's parameters, estimated from its config.json layer by layer.

A layer mixes tokens, by attention or by a recurrent layer such as a state space, and has a feed-forward,
which may be a mixture of experts. Lists or periods, whose names differ by family, say which layer has which.
Biases and norms within layers are left out: less than 1 % of any real model.

The shapes are those of the families' modules in transformers 5.23; a test compares the sums with the models
that it builds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

MOST_LAYERS = 1_000
"""Several times those of the deepest known model."""


@dataclass(frozen=True)
class Widths:
    """Sizes of a model's layers, in elements."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    inner: int
    """Of a feed-forward without experts."""
    experts: int
    """1: no layer has experts."""
    expert_inner: int
    shared_experts: int
    matrices: int
    """Of a feed-forward: 3 with a gate, otherwise 2."""


def in_layers(family: str, config: Config, widths: Widths) -> int:
    """Parameters of all layers.

    Args:
        config: the part of config.json about the language model.

    Raises:
        TypeError, ValueError: a size is not a number, or there are more layers than in any real model.
    """
    layers = 2 * _size(config, "num_layers_per_stack") or widths.layers  # HRM repeats two stacks
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"the number of layers must be from 1 to {MOST_LAYERS:,}")
    kinds = _kinds(family, config, layers)
    mixers = _mixers(family, config, widths, kinds)
    return mixers + _feed_forwards(family, config, widths, kinds) + 2 * widths.hidden * layers


def _mixers(family: str, config: Config, widths: Widths, kinds: Sequence[str]) -> int:
    """Parameters of what mixes tokens in layers of these kinds."""
    total = 0
    with_attention = sum(kind in ("attention", "both") for kind in kinds)
    if with_attention:
        total += with_attention * _attention(family, config, widths)
    recurrent = sum(kind in ("recurrent", "both", "shared") for kind in kinds)
    if recurrent:
        total += recurrent * _recurrent(family, config, widths)
    if "shared" in kinds:  # one block's attention, whose inputs are twice as wide, and a product per layer
        total += (14 * _shared_blocks(config) + kinds.count("shared")) * widths.hidden**2
        rank = _size(config, "adapter_rank")  # each layer's changes to the shared feed-forward
        total += kinds.count("shared") * rank * (widths.hidden + 2 * widths.inner)
    return total


def _feed_forwards(family: str, config: Config, widths: Widths, kinds: Sequence[str]) -> int:
    """Parameters of the feed-forwards of layers of these kinds."""
    dense = widths.matrices * widths.hidden * widths.inner
    if family in _WITHOUT_FEED_FORWARD:
        return _shared_blocks(config) * dense if "shared" in kinds else 0
    if family in _ONE_PART_PER_LAYER:
        with_experts, without = kinds.count("experts"), kinds.count("dense")
    else:
        with_experts = _with_experts(config, len(kinds)) if widths.experts > 1 else 0
        without = len(kinds) - (0 if config.get("enable_moe_block") else with_experts)  # Gemma 4 has both
    return without * dense + (with_experts * _experts(family, config, widths) if with_experts else 0)


def _shared_blocks(config: Config) -> int:
    """Zamba's blocks of attention and feed-forward, which several layers share."""
    return _size(config, "num_mem_blocks") or 1


def in_embeddings(family: str, config: Config, hidden: int, vocabulary: int, layers: int, tied: bool) -> int:
    """Parameters of the embeddings of tokens and positions, and of the output head."""
    width = _size(config, "embedding_size") or hidden
    total = vocabulary * width * (1 if tied else 2)
    if width != hidden:
        total += hidden * width * (1 if tied else 2)
    if family in _LEARNED_POSITIONS or family in _CROSS_ATTENTION:
        total += hidden * _size(config, "max_position_embeddings", "max_target_positions", "n_positions")
    by_layer = _size(config, "hidden_size_per_layer_input")  # Gemma 3n and 4
    if by_layer:
        rows = _size(config, "vocab_size_per_layer_input") or vocabulary
        total += by_layer * layers * (rows + 3 * hidden)
    rank, inputs = _size(config, "laurel_rank"), (_size(config, "altup_num_inputs") or 1)
    return total + 2 * hidden * rank * layers + 2 * (inputs - 1) * hidden**2


def in_towers(family: str, config: Config) -> int:
    """Parameters of the encoders of images and sound that are loaded with a language model."""
    towers = () if family in _TEXT_ALONE else TOWERS
    return sum(_in_tower(family, tower) for name in towers if isinstance(tower := config.get(name), Mapping))


def _in_tower(family: str, tower: Config) -> int:
    layer_counts, widths, inner_widths = TOWER_SIZE_NAMES
    layers = _size(tower, *layer_counts)
    hidden = _size(tower, *(("embed_dim", "hidden_size") if family == "qwen2_vl" else widths))
    inner = _size(tower, *inner_widths) or max(0, int(float(tower.get("mlp_ratio") or 4) * hidden))
    total = layers * (4 * hidden**2 + 2 * hidden * inner)
    if family == "qwen2_5_vl":  # its feed-forward has a gate
        total += layers * hidden * inner
    if family in _MERGING_TOWERS:
        merged = hidden * (_size(tower, "spatial_merge_size") or 2) ** 2
        deeper = tower.get(
            "deepstack_visual_indexes"
        )  # layers of Qwen3-VL after which there is one more each
        mergers = 1 + (len(deeper) if isinstance(deeper, list) else 0)
        total += mergers * merged * (merged + _size(tower, "out_hidden_size", "hidden_size"))
        total += hidden * _size(tower, "num_position_embeddings")
    return total


TOWERS = ("vision_config", "audio_config")
"""The parts of a config about encoders of images and sound."""

TOWER_SIZE_NAMES = (
    ("num_hidden_layers", "depth", "layers", "conf_num_hidden_layers"),
    ("hidden_size", "embed_dim", "width"),
    ("intermediate_size",),
)
"""The names of a tower's layers, width and inner width."""

_MERGING_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families with a feed-forward that joins neighbouring patches of an image. In Qwen2-VL, `hidden_size` is the
width of its output, and `embed_dim` the tower's own."""


_TEXT_ALONE = ("mllama", "qwen3_5", "qwen3_5_moe")
"""Families with towers whose language model is loaded without them."""


_ONE_PART_PER_LAYER = ("nemotron_h",)
"""Families whose layers either mix tokens or have a feed-forward."""

_WITHOUT_FEED_FORWARD = ("mamba", "mamba2", "falcon_mamba", "zamba", "zamba2")
"""Families whose layers mix tokens and do nothing else."""

_ALL_RECURRENT = ("mamba", "mamba2", "falcon_mamba")
_FIRST_MAMBA = ("mamba", "falcon_mamba", "jamba", "zamba")

_CROSS_ATTENTION = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper
    """.split()  # noqa: SIM905
)
"""Families whose decoder attends to an encoder, too, even if it is used without one."""

_LEARNED_POSITIONS = frozenset(
    """
    bert bert-generation big_bird biogpt camembert data2vec-text electra ernie git gpt-sw3 gpt_bigcode gpt_neo
    megatron-bert openai-gpt roberta roberta-prelayernorm roc_bert rembert xlm xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)

_GATED_ATTENTION = frozenset(
    """
    afmoe beam hrm_text laguna lfm3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
    qwen4_exp_text
    """.split()  # noqa: SIM905
)
"""Families whose attention multiplies its output by a gate as wide as the queries."""

_KINDS = {
    "recurrent": ("mamba", "M", "linear_attention", "linear", "recurrent", "conv", "short_conv"),
    "dense": ("mlp", "-"), "experts": ("moe", "E"),
}  # fmt: skip
"""Names of layers' kinds in configs. Any other is a kind of attention."""


def _kinds(family: str, config: Config, layers: int) -> list[str]:
    """Each layer's kind: "attention", "recurrent", "both" at once, "shared", "dense" or "experts"."""
    if family in _ALL_RECURRENT:
        return ["recurrent"] * layers
    if family == "falcon_h1":
        return ["both"] * layers
    names = _names_by_layer(config, layers)
    kinds = {name: kind for kind, named in _KINDS.items() for name in named}
    if family in ("zamba", "zamba2"):
        kinds["hybrid"] = "shared"
        return [kinds.get(name, "recurrent") for name in names]
    return [kinds.get(name, "attention") for name in names]


def _names_by_layer(config: Config, layers: int) -> list[str]:
    """The name of each layer's kind, as the config lists it or describes it by a period."""
    lists = ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types", "attn_type_list")
    listed = _first(config, lists)
    if isinstance(listed, (list, str)) and listed:
        names: dict[Any, str] = {0: "linear_attention", 1: "full_attention"}  # MiniMax has numbers
        return [str(names.get(name := listed[layer % len(listed)], name)) for layer in range(layers)]
    indices = _first(config, ("attn_layer_indices", "full_attn_idxs"))
    if isinstance(indices, list):
        chosen = _numbers(indices)
        return ["attention" if layer in chosen else "recurrent" for layer in range(layers)]
    period = _size(config, "attn_layer_period", "full_attention_interval", "layer_group_size") or 1
    offset = _size(config, "attn_layer_offset") if "attn_layer_period" in config else period - 1
    if "attn_layer_indices" in config:  # Bamba: null means that no layer has attention
        return ["recurrent"] * layers
    return ["attention" if layer % period == offset % period else "recurrent" for layer in range(layers)]


def _attention(family: str, config: Config, widths: Widths) -> int:
    hidden, heads, head_dim = widths.hidden, widths.heads, widths.head_dim
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    if family == "jetmoe":  # each expert has queries and an output of its own
        width = _size(config, "kv_channels") * widths.key_value_heads
        return 2 * hidden * width * (1 + widths.experts)
    total = 2 * hidden * head_dim * (heads + widths.key_value_heads)
    if family in _GATED_ATTENTION:
        total += hidden * head_dim * heads
    return total * (2 if family in _CROSS_ATTENTION else 1)


def _latent_attention(config: Config, hidden: int, heads: int) -> int:
    """DeepSeek's attention, with keys and values from a narrow latent vector."""
    rotated, plain = _size(config, "qk_rope_head_dim"), _size(config, "qk_nope_head_dim")
    values, latent = (_size(config, "v_head_dim") or plain), _size(config, "kv_lora_rank")
    queries, through = heads * (rotated + plain), _size(config, "q_lora_rank")
    total = through * (hidden + queries) if through else hidden * queries
    total += hidden * (latent + rotated) + latent * heads * (plain + values)
    return total + heads * values * hidden


def _recurrent(family: str, config: Config, widths: Widths) -> int:
    """Parameters of a layer that mixes tokens without attention."""
    hidden = widths.hidden
    if config.get("linear_num_value_heads"):  # gated delta net (Qwen 3.5, OLMo hybrid)
        values, keys = _size(config, "linear_num_value_heads"), _size(config, "linear_num_key_heads")
        keys_width, values_width = (
            keys * _size(config, "linear_key_head_dim"),
            values * _size(config, "linear_value_head_dim"),
        )
        return hidden * (2 * keys_width + 3 * values_width + 2 * values)
    if config.get("linear_num_heads"):  # Kimi's delta attention
        head_dim = _size(config, "linear_head_dim")
        width = _size(config, "linear_num_heads") * head_dim
        return 4 * hidden * width + 2 * head_dim * (hidden + width)
    if config.get("lru_width"):  # RecurrentGemma
        width = _size(config, "lru_width")
        return 3 * hidden * width + 2 * width**2 // widths.heads
    if config.get("conv_L_cache"):  # LFM2: a short convolution between two products
        return 4 * hidden**2 + hidden * _size(config, "conv_L_cache")
    state = _size(config, "mamba_d_state", "ssm_state_size", "state_size")
    if state:
        return _state_space(family, config, hidden, state)
    return 5 * hidden * widths.heads * widths.head_dim  # MiniMax's lightning attention: with a gate


def _state_space(family: str, config: Config, hidden: int, state: int) -> int:
    """Parameters of a layer of Mamba 2 or, in older families, Mamba."""
    expand = float(_first(config, ("mamba_expand", "expand")) or 2)
    if expand <= 0:
        raise ValueError("expand must not be negative")
    inner = _size(config, "mamba_d_ssm") or int(expand * hidden)
    convolution = 1 + (_size(config, "mamba_d_conv", "conv_kernel") or 4)
    if family not in _FIRST_MAMBA:
        groups = _size(config, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        heads = _size(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
        inner = heads * _size(config, "mamba_head_dim") or inner
        states = 2 * groups * state
        return hidden * (3 * inner + states + heads) + convolution * (inner + states)
    if family in _ALL_RECURRENT:
        inner = _size(config, "intermediate_size") or inner
    ranks = ("mamba_dt_rank", "time_step_rank")
    rank = _size(config, *ranks) if isinstance(_first(config, ranks), int) else math.ceil(hidden / 16)  # auto
    return inner * (3 * hidden + 2 * rank + 3 * state + convolution)


def _with_experts(config: Config, layers: int) -> int:
    """How many layers of a model with experts have them."""
    kinds, every = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if isinstance(kinds, list):
        return sum(kind != "dense" for kind in kinds[:layers])
    if isinstance(every, list):
        return sum(each == 1 for each in every[:layers])
    chosen = config.get("moe_layers")
    if isinstance(chosen, list):
        return len(_numbers(chosen) & set(range(layers)))
    first = _size(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    period = _size(config, *_EXPERT_PERIODS) or 1
    offset = _size(config, "expert_layer_offset") if "expert_layer_period" in config else period - 1
    without = _numbers(config.get("mlp_only_layers") or ())
    return sum(
        layer % period == offset % period and layer not in without
        for layer in range(first, layers)
    )  # fmt: skip


_EXPERT_PERIODS = ("expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step")


def _numbers(listed: Sequence[Any]) -> set[int]:
    return {each for each in listed if isinstance(each, int)}


_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    "shared_experts_intermediate_size",
)  # fmt: skip
_ONE_SHARED_EXPERT = ("llama4", "llama4_text", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families whose layers have a shared expert that no field counts."""


def _experts(family: str, config: Config, widths: Widths) -> int:
    """Parameters of a mixture: its experts, those that are always active, and the router."""
    own = _size(config, *_SHARED_WIDTH)
    shared = widths.shared_experts or (1 if own or family in _ONE_SHARED_EXPERT else 0)
    inner = widths.experts * widths.expert_inner + shared * (own or widths.expert_inner)
    return widths.matrices * widths.hidden * inner + widths.hidden * widths.experts


def _size(config: Config, *names: str) -> int:
    """A size under the first of these names that the config has; 0 if it has none.

    Raises:
        TypeError, ValueError: it is not a number, or negative.
    """
    size = int(_first(config, names) or 0)
    if size < 0:
        raise ValueError(f"{names[0]} must not be negative")
    return size


def _first(config: Config, names: Sequence[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
