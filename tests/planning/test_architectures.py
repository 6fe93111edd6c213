import contextlib
import time
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from app.planning.architectures import UnknownArchitecture, from_config, named
from app.planning.catalogue import CATALOGUE, pretrained_base_of
from app.planning.families import MULTIMODAL
from tests.harness.config_defaults import FILE, as_text, default_sizes


def counted(config: PreTrainedConfig) -> int:
    """Parameters by transformers' own construction, without memory for them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("owner/another", None),
        ("a/gpt2", None),
        ("q/bloom-it-2", None),
    ],
)
def test_a_tuned_variant_has_the_sizes_of_its_base(name: str, base: str | None) -> None:
    assert pretrained_base_of(name) == base


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue_counts_equal_transformers(name: str) -> None:
    fields = dict(CATALOGUE[name])
    architecture = named(name)
    assert architecture is not None
    assert architecture.parameters == counted(AutoConfig.for_model(fields.pop("model_type"), **fields))


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 301, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_layer=2, n_embd=48, n_head=4, n_inner=100, vocab_size=77),
        LlamaConfig(**SMALL, num_key_value_heads=2),
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        MistralConfig(**SMALL, num_key_value_heads=2, head_dim=32),
        MistralConfig(**SMALL, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
        Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32),
        OPTConfig(hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99),
        OPTConfig(
            hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
            word_embed_proj_dim=32, do_layer_norm_before=False,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_counts_from_a_config_equal_transformers(config: PreTrainedConfig) -> None:
    assert from_config(config.to_dict()).parameters == counted(config)


def test_short_names_are_the_hub_s() -> None:
    assert named("gpt2") == named("openai-community/gpt2")
    assert named("gpt2").parameters == 124_439_808  # type: ignore[union-attr]
    assert named("no-such-model") is None


NEWER = {
    "model_type": "newer", "architectures": ["NewerForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "vocab_size": 99,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": None}, "no layers: one of num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps in config.json is not a number \(NaN\)"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps in config.json is larger than"),
        ({"vocab_size": [1]}, "a size is null, or not a number"),
    ],
    ids=str,
)
def test_an_error_says_what_is_wrong_with_a_config(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownArchitecture, match=why):
        from_config({**NEWER, **changes})


def test_a_family_newer_than_the_list_is_estimated() -> None:
    assert from_config(NEWER).is_estimated
    with pytest.raises(UnknownArchitecture, match="code that comes with the model"):
        from_config({**NEWER, "auto_map": {"AutoConfig": "own.Config"}})
    with pytest.raises(UnknownArchitecture, match="encoder"):
        from_config({**NEWER, "model_type": "bert"})


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "t5"}, {"model_type": "gpt2", "n_layer": "x"}, {**NEWER, "vocab_size": None}],
)
def test_an_unsupported_config_gets_a_clear_error(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture):
        from_config(config)


def test_the_default_sizes_are_those_of_the_installed_transformers() -> None:
    """`python -m tests.harness.config_defaults` renews the list."""
    assert FILE.read_text() == as_text(default_sizes())


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(
            {
                "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "sliding_window": 1024,
                },
            },
            (34, 2560, 8, 4, 256, 262_208, 131_072), id="google/gemma-3-4b-it",
        ),
        pytest.param(
            {
                "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
            },
            (32, 4096, 32, 32, 128, 32_064, 4096), id="llava-hf/llava-1.5-7b-hf",
        ),
        pytest.param({"model_type": "gpt2", "vocab_size": 300}, (12, 768, 12, 12, 64, 300, 1024), id="gpt2"),
        pytest.param(
            {
                "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "vocab_size": 300, "max_sequence_length": 77,
            },
            (2, 64, 4, 4, 16, 300, 77), id="an old name of the context length",
        ),
    ],
)  # fmt: skip
def test_sizes_that_a_config_leaves_out_are_the_family_s_defaults(
    config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    found = from_config(config)
    names = ("layers", "hidden_size", "heads", "key_value_heads", "head_dim", "vocabulary", "positions")
    assert tuple(getattr(found, name) for name in names) == sizes


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma2", "gemma3_text", "mistral"])
def test_parameters_are_counted_with_the_family_s_default_heads(family: str) -> None:
    config = {
        "model_type": family, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 16,
        "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    architecture = from_config(config)
    assert not architecture.is_estimated
    assert architecture.parameters == counted(AutoConfig.for_model(config.pop("model_type"), **config))


ESTIMATED = [
    "apertus", "arcee", "bamba", "bart", "deepseek_v3", "doge", "jetmoe", "ernie4_5_moe",
    "falcon_h1", "falcon_mamba", "gemma3", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoehybrid",
    "internvl", "jamba", "kimi_linear", "lfm2", "llama4", "llava", "mamba", "mamba2", "minimax", "mllama",
    "nanochat", "nemotron_h", "olmo_hybrid", "qwen2_moe", "qwen3_5", "qwen3_next", "qwen3_vl",
    "recurrent_gemma", "whisper", "xlstm", "zamba", "zamba2",
]  # fmt: skip


def built(config: PreTrainedConfig, family: str) -> int:
    """Parameters by transformers' own construction, with towers where the family has them."""
    auto = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", ESTIMATED)
def test_estimated_parameters_are_near_those_of_the_model(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    architecture = from_config({**config.to_dict(), "model_type": family})
    assert architecture.is_estimated
    assert architecture.parameters == pytest.approx(built(config, family), rel=0.02)


_TEXT_OF_VL = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1536, "vocab_size": 8000,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {
        "n_embd": 1024, "n_layer": 4, "n_head": 16, "n_inner": 4096, "n_positions": 2048, "multi_query": True,
        "vocab_size": 2000,
    },
    "smolvlm": {  # with the default depth and inner width of a tower
        "text_config": {**_TEXT_OF_VL, "model_type": "llama", "vocab_size": 100_000},
        "vision_config": {"hidden_size": 768, "image_size": 512, "patch_size": 16, "num_attention_heads": 12},
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT_OF_VL, "tie_word_embeddings": False},
        "vision_config": {
            "depth": 8, "embed_dim": 640, "hidden_size": 512, "mlp_ratio": 4, "num_heads": 10,
            "spatial_merge_size": 2,
        },
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT_OF_VL, "head_dim": 64, "tie_word_embeddings": False},
        "vision_config": {
            "depth": 8, "hidden_size": 640, "out_hidden_size": 512, "intermediate_size": 1710,
            "num_heads": 10, "spatial_merge_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [2, 4, 6],
        },
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT_OF_VL, "tie_word_embeddings": False},
        "vision_config": {
            "depth": 8, "hidden_size": 640, "out_hidden_size": 512, "intermediate_size": 1710,
            "num_heads": 10, "spatial_merge_size": 2,
        },
        "tie_word_embeddings": False,
    },
    "falcon_mamba": {
        "hidden_size": 512, "intermediate_size": 1024, "expand": 16, "num_hidden_layers": 4, "state_size": 16,
        "time_step_rank": 32, "conv_kernel": 4, "vocab_size": 2000, "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "hidden_size": 1024, "expand": 2, "hybrid_override_pattern": "M-M*-M-", "intermediate_size": 4096,
        "mamba_num_heads": 40, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 2000, "tie_word_embeddings": False,
    },
    "jamba": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "attn_layer_period": 4,
        "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "mamba_d_state": 16, "mamba_dt_rank": "auto",
        "vocab_size": 2000, "tie_word_embeddings": False,
    },
    "bamba": {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6, "attn_layer_indices": [2, 4],
        "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 2000, "tie_word_embeddings": False,
    },
    "granitemoehybrid": {
        "hidden_size": 1024, "intermediate_size": 2048, "shared_intermediate_size": 3072,
        "num_local_experts": 0, "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 32, "mamba_d_state": 128,
        "mamba_d_head": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2000,
        "tie_word_embeddings": True,
    },
    "zamba2": {
        "hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 4096, "num_mem_blocks": 2,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        "hybrid_layer_ids": [2, 5], "mamba_d_state": 64, "n_mamba_heads": 32, "adapter_rank": 128,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2000,
    },
    "lfm2": {
        "hidden_size": 1024, "block_ff_dim": 4096, "block_multiple_of": 256, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "num_hidden_layers": 6, "full_attn_idxs": [2, 5], "conv_L_cache": 3,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 2000,
    },
    "qwen3_next": {
        "hidden_size": 512, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256, "full_attention_interval": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 2000, "tie_word_embeddings": False,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "deepseek_v3": {
        "hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 256, "num_hidden_layers": 5,
        "first_k_dense_replace": 2, "n_routed_experts": 8, "n_shared_experts": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "vocab_size": 2000,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Small configs with the names of fields that these families' published config.json files use."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_layers_are_counted_as_published_configs_describe_them(family: str) -> None:
    fields = PUBLISHED[family]
    architecture = from_config({"model_type": family, **fields})
    config = AutoConfig.for_model(family, **fields)
    assert architecture.parameters == pytest.approx(built(config, family), rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_s_tied_head_goes_before_its_language_model_s(tied: bool) -> None:
    text = {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2}
    config = {"model_type": "internvl", "text_config": {**text, "tie_word_embeddings": not tied}}
    untied = from_config({**config, "tie_word_embeddings": False}).parameters
    difference = untied - from_config({**config, "tie_word_embeddings": tied}).parameters
    assert difference == (SMALL["vocab_size"] * SMALL["hidden_size"] if tied else 0)


@pytest.mark.parametrize(
    "hostile",
    [{"num_hidden_layers": 2**31 - 1}, {"num_layers_per_stack": 2**30}, {"attn_layer_period": 2**31},
     {"layer_types": [["a"]]}, {"vision_config": {"depth": 10**400}}, {"mlp_layer_types": [None] * 10_000}],
)  # fmt: skip
def test_a_hostile_config_is_answered_at_once(hostile: dict[str, Any]) -> None:
    config = {"model_type": "deepseek_v3", **PUBLISHED["deepseek_v3"], **hostile}
    begin = time.monotonic()
    with contextlib.suppress(UnknownArchitecture):
        from_config(config)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    "negative",
    [{"embedding_size": -5}, {"qk_rope_head_dim": -10}, {"vision_config": {"depth": -9, "hidden_size": 9}},
     {"first_k_dense_replace": -(2**31)}, {"hidden_size_per_layer_input": -7}],
)  # fmt: skip
def test_negative_sizes_do_not_make_a_model_seem_smaller(negative: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match="must not be negative"):
        from_config({"model_type": "deepseek_v3", **PUBLISHED["deepseek_v3"], **negative})


def test_a_multimodal_family_s_default_ties_the_head_whatever_the_text_part_says() -> None:
    text = {**_TEXT_OF_VL, "model_type": "qwen2", "tie_word_embeddings": False}
    config = {"model_type": "internvl", "text_config": text}
    assert AutoConfig.for_model("internvl", text_config=text).tie_word_embeddings
    counts = [
        from_config({**config, **own}).parameters
        for own in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})
    ]
    assert counts[0] == counts[1] == counts[2] - 8000 * 512


def test_sizes_in_configs_within_the_config_are_read() -> None:
    """Those of databricks/dbrx-base, which has 131.6 billion parameters."""
    config = {
        "model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 6144, "n_heads": 48,
        "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352, "tie_word_embeddings": False,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }  # fmt: skip
    architecture = from_config(config)
    assert architecture.parameters == pytest.approx(131.6e9, rel=0.01)
    assert (architecture.experts, architecture.active_experts, architecture.key_value_heads) == (16, 4, 8)
