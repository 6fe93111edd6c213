from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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


def test_a_family_newer_than_the_list_is_estimated() -> None:
    assert from_config(NEWER).is_estimated
    with pytest.raises(UnknownArchitecture, match="code that comes with the model"):
        from_config({**NEWER, "auto_map": {"AutoConfig": "own.Config"}})
    with pytest.raises(UnknownArchitecture, match="encoder"):
        from_config({**NEWER, "model_type": "bert"})


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "t5"}, {"model_type": "gpt2"}, {"model_type": "gpt2", "n_layer": "x"}]
)
def test_an_unsupported_config_gets_a_clear_error(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture):
        from_config(config)
