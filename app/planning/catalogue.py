"""Well-known models by hub id, with the fields of their published config.json that sizes depend on.

The catalogue lets planning work offline. Its figures are those of the models' own config.json files; a test
counts the parameters of each model with transformers.
"""

import re
from typing import Any

from app.contract.architecture import BUILT_IN_MODEL

Config = dict[str, Any]

TINY_GPT2: Config = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 1024, "vocab_size": 260,
}  # fmt: skip
"""The built-in model: one token per byte, and four special ones."""


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip


def _llama(
    layers: int, hidden: int, inner: int, heads: int, key_value_heads: int, vocabulary: int, positions: int,
    **more: Any,
) -> Config:  # fmt: skip
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": key_value_heads, "vocab_size": vocabulary,
        "max_position_embeddings": positions, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen(family: str, layers: int, hidden: int, inner: int, heads: int, key_value_heads: int,
          vocabulary: int, positions: int, tied: bool = False, **more: Any) -> Config:  # fmt: skip
    return _llama(
        layers, hidden, inner, heads, key_value_heads, vocabulary, positions, model_type=family,
        **{"tie_word_embeddings": tied, "use_sliding_window": False, **more},
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, inner: int, heads: int, tied: bool = False) -> Config:
    return _qwen("qwen3", layers, hidden, inner, heads, 8, 151936, 40960, tied, head_dim=128)


def _gemma2(layers: int, hidden: int, inner: int, heads: int, key_value_heads: int, head_dim: int) -> Config:
    return _llama(
        layers, hidden, inner, heads, key_value_heads, 256000, 8192, model_type="gemma2", head_dim=head_dim,
        tie_word_embeddings=True, sliding_window=4096, final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    )  # fmt: skip


def _gemma3(layers: int, hidden: int, inner: int, heads: int, key_value_heads: int, window: int) -> Config:
    return _llama(
        layers, hidden, inner, heads, key_value_heads, 262144, 32768, model_type="gemma3_text", head_dim=256,
        tie_word_embeddings=True, sliding_window=window,
    )  # fmt: skip


def _phi3(layers: int, hidden: int, inner: int, heads: int, key_value_heads: int, vocabulary: int,
          positions: int, **more: Any) -> Config:  # fmt: skip
    return _llama(
        layers, hidden, inner, heads, key_value_heads, vocabulary, positions,
        **{"model_type": "phi3", "pad_token_id": None, **more},
    )  # fmt: skip


def _neox(layers: int, hidden: int, heads: int, vocabulary: int) -> Config:
    return {
        "model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_attention_heads": heads, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip


def _opt(layers: int, hidden: int, heads: int, **more: Any) -> Config:
    return {
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden, "ffn_dim": 4 * hidden,
        "num_attention_heads": heads, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden, **more,
    }  # fmt: skip


def _bloom(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "bloom", "n_layer": layers, "hidden_size": hidden, "n_head": heads, "seq_length": 2048,
        "vocab_size": 250880,
    }  # fmt: skip


def _falcon(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> Config:
    return {
        "model_type": "falcon", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "vocab_size": vocabulary, "bias": False, "parallel_attn": True, **more,
    }  # fmt: skip


CATALOGUE: dict[str, Config] = {
    BUILT_IN_MODEL: TINY_GPT2,
    "distilbert/distilgpt2": _gpt2(6, 768, 12),
    "openai-community/gpt2": _gpt2(12, 768, 12),
    "openai-community/gpt2-medium": _gpt2(24, 1024, 16),
    "openai-community/gpt2-large": _gpt2(36, 1280, 20),
    "openai-community/gpt2-xl": _gpt2(48, 1600, 25),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(22, 2048, 5632, 32, 4, 32000, 2048),
    "HuggingFaceTB/SmolLM2-135M": _llama(30, 576, 1536, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(32, 960, 2560, 15, 5, 49152, 8192, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(24, 2048, 8192, 32, 32, 49152, 8192, tie_word_embeddings=True),
    "meta-llama/Llama-2-7b-hf": _llama(32, 4096, 11008, 32, 32, 32000, 4096),
    "meta-llama/Llama-2-13b-hf": _llama(40, 5120, 13824, 40, 40, 32000, 4096),
    "meta-llama/Llama-2-70b-hf": _llama(80, 8192, 28672, 64, 8, 32000, 4096),
    "meta-llama/Meta-Llama-3-8B": _llama(32, 4096, 14336, 32, 8, 128256, 8192),
    "meta-llama/Meta-Llama-3-70B": _llama(80, 8192, 28672, 64, 8, 128256, 8192),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "meta-llama/Llama-3.1-405B": _llama(126, 16384, 53248, 128, 8, 128256, 131072),
    "meta-llama/Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64,
                                      tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama(28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128,
                                      tie_word_embeddings=True),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(80, 8192, 28672, 64, 8, 128256, 131072),
    "Qwen/Qwen2.5-0.5B": _qwen("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen("qwen2", 28, 1536, 8960, 12, 2, 151936, 131072, tied=True),
    "Qwen/Qwen2.5-3B": _qwen("qwen2", 36, 2048, 11008, 16, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-7B": _qwen("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
    "Qwen/Qwen2.5-14B": _qwen("qwen2", 48, 5120, 13824, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-32B": _qwen("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-72B": _qwen("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17408, 40),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "Qwen/Qwen3-30B-A3B": _qwen("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960, head_dim=128,
                                moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                                decoder_sparse_step=1, mlp_only_layers=[]),
    "mistralai/Mistral-7B-v0.1": _llama(32, 4096, 14336, 32, 8, 32000, 32768, model_type="mistral",
                                        sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": _llama(32, 4096, 14336, 32, 8, 32768, 32768, model_type="mistral",
                                        sliding_window=None),
    "mistralai/Mistral-Nemo-Base-2407": _llama(40, 5120, 14336, 32, 8, 131072, 131072, model_type="mistral",
                                               head_dim=128, sliding_window=None),
    "mistralai/Mixtral-8x7B-v0.1": _llama(32, 4096, 14336, 32, 8, 32000, 32768, model_type="mixtral",
                                          num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "mistralai/Mixtral-8x22B-v0.1": _llama(56, 6144, 16384, 48, 8, 32000, 65536, model_type="mixtral",
                                           num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "google/gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4, 256),
    "google/gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8, 256),
    "google/gemma-2-27b": _gemma2(46, 4608, 36864, 32, 16, 128),
    "google/gemma-3-270m": _gemma3(18, 640, 2048, 4, 1, 512),
    "google/gemma-3-1b-pt": _gemma3(26, 1152, 6912, 4, 1, 512),
    "microsoft/Phi-3-mini-4k-instruct": _phi3(32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047),
    "microsoft/Phi-3-medium-4k-instruct": _phi3(40, 5120, 17920, 40, 10, 32064, 4096, sliding_window=2047),
    "microsoft/phi-4": _phi3(40, 5120, 17920, 40, 10, 100352, 16384, sliding_window=None),
    "EleutherAI/pythia-70m": _neox(6, 512, 8, 50304),
    "EleutherAI/pythia-160m": _neox(12, 768, 12, 50304),
    "EleutherAI/pythia-410m": _neox(24, 1024, 16, 50304),
    "EleutherAI/pythia-1b": _neox(16, 2048, 8, 50304),
    "EleutherAI/pythia-1.4b": _neox(24, 2048, 16, 50304),
    "EleutherAI/pythia-2.8b": _neox(32, 2560, 32, 50304),
    "EleutherAI/pythia-6.9b": _neox(32, 4096, 32, 50432),
    "EleutherAI/pythia-12b": _neox(36, 5120, 40, 50688),
    "EleutherAI/gpt-neox-20b": _neox(44, 6144, 64, 50432),
    "facebook/opt-125m": _opt(12, 768, 12),
    "facebook/opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(24, 2048, 32),
    "facebook/opt-2.7b": _opt(32, 2560, 32),
    "facebook/opt-6.7b": _opt(32, 4096, 32),
    "facebook/opt-13b": _opt(40, 5120, 40),
    "facebook/opt-30b": _opt(48, 7168, 56),
    "facebook/opt-66b": _opt(64, 9216, 72),
    "bigscience/bloom-560m": _bloom(24, 1024, 16),
    "bigscience/bloom-1b1": _bloom(24, 1536, 16),
    "bigscience/bloom-1b7": _bloom(24, 2048, 16),
    "bigscience/bloom-3b": _bloom(30, 2560, 32),
    "bigscience/bloom-7b1": _bloom(30, 4096, 32),
    "bigscience/bloom": _bloom(70, 14336, 112),
    "tiiuae/falcon-7b": _falcon(32, 4544, 71, 65024, multi_query=True, new_decoder_architecture=False),
    "tiiuae/falcon-40b": _falcon(60, 8192, 128, 65024, num_kv_heads=8, new_decoder_architecture=True),
}  # fmt: skip

ALIASES = {
    name.split("/")[1].lower(): name
    for name in CATALOGUE
    if name != BUILT_IN_MODEL
}  # fmt: skip
"""Hub ids by the part after the slash, in lower case: gpt2, llama-3.1-8b."""


_TUNED = re.compile(r"-(instruct|it|chat|base|thinking)(?=-|$)")


def pretrained_base_of(name: str) -> str | None:
    """The model in the catalogue that has the same sizes as a tuned variant, by its name:
    meta-llama/Llama-3.1-8B for Llama-3.1-8B-Instruct. None if there is none."""
    part = name.rpartition("/")[2].lower()
    if not _TUNED.search(part):
        return None
    spellings = (_TUNED.sub(replacement, part) for replacement in ("", "-base", "-pt"))
    return next((ALIASES[each] for each in spellings if each in ALIASES), None)


def config_of(name: str) -> Config | None:
    """The catalogue's config for a hub id or an alias; None if there is none."""
    return CATALOGUE.get(ALIASES.get(name.lower(), name))
