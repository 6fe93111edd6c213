"""Small models of any family that transformers' AutoModelForCausalLM builds, from their default configs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app.contract.model_reference import ModelReference
from app.contract.spec import Spec
from app.planning.architectures import from_config
from tests.harness.runs import create_run
from workers.run_directory import RunDirectory
from workers.training.models.auto_class import auto_class
from workers.training.models.tiny_gpt2 import make_tokenizer

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip
ALL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_WIDTHS = "hidden_size n_embd n_embed d_model dim embedding_size embed_dim embedding_dim lru_width"
_HEADS = "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads"
_INNER = (
    "intermediate_size n_inner ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ff_dim dff "
    "intermediate_size_mlp block_ff_dim dense_intermediate_size"
)
_POSITIONS = (
    "max_position_embeddings n_positions n_ctx seq_length max_seq_len max_sequence_length "
    "max_target_positions"
)
_EXPERT_WIDTHS = (
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size moe_ffn_hidden_size "
    "shared_intermediate_size expert_hidden_size moe_shared_expert_intermediate_size"
)
_EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts"
_ACTIVE = "num_experts_per_tok num_experts_per_token moe_topk moe_k num_selected_experts top_k_experts"
_EIGHT = (
    "head_dim attention_head_dim kv_channels global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_n_heads mamba_d_head mamba_num_heads "
    "mamba_head_dim mamba_headdim ssm_state_size state_size hidden_size_per_layer_input index_head_dim"
)
_WINDOWS = (
    "sliding_window attention_window window_size attention_window_size mamba_chunk_size chunk_size index_topk"
)
_ONE = "n_group topk_group n_shared_experts num_expert_group first_k_dense_replace mamba_n_groups n_groups"

SIZES: dict[str, int] = {
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys([*_HEADS.split(), "num_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"], 2),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_POSITIONS.split(), 512),
    **dict.fromkeys(_EXPERT_WIDTHS.split(), 32),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys([*_ACTIVE.split(), "linear_num_key_heads", "n_mamba_heads", "index_n_heads"], 2),
    **dict.fromkeys(_EIGHT.split(), 8),
    **dict.fromkeys(_WINDOWS.split(), 16),
    **dict.fromkeys(_ONE.split(), 1),
    "vocab_size": 260, "vocab_size_per_layer_input": 260, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_head_dim": 16, "linear_num_value_heads": 4, "mamba_d_ssm": 64, "mamba_dt_rank": 4, "mamba_expand": 2,
    "time_step_rank": 4, "laurel_rank": 4, "num_kv_shared_layers": 0, "rotary_dim": 4,
    "word_embed_proj_dim": 32, "image_size": 32, "patch_size": 16, "bos_token_id": 256, "eos_token_id": 256,
    "pad_token_id": 257, "decoder_start_token_id": 256,
}  # fmt: skip
"""Sizes of any family that has a field of that name."""

_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
"""Fields that transformers fills in from the number of layers."""

_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_IN_SECTIONS = {"rope_parameters": _SECTIONS}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_vl": _IN_SECTIONS,
    "qwen2_vl_text": _IN_SECTIONS,
    "qwen2_5_vl": _IN_SECTIONS,
    "qwen2_5_vl_text": _IN_SECTIONS,
    "glm4v_text": _IN_SECTIONS,
    "glm_ocr_text": _IN_SECTIONS,
    "glm4v_moe_text": {
        "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "reformer": {"axial_pos_embds": False},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
}
"""Fields of families whose sizes depend on each other."""


def small_config(family: str, **sizes: int) -> Any:
    """A family's config with two layers of width 32, without dropout.

    Args:
        sizes: others than those in `SIZES`.
    """
    config = _shrunk(CONFIG_MAPPING[family], SPECIAL.get(family, {}), sizes)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name or "drop_rate" in name):
                setattr(part, name, 0.0)
        if hasattr(part, "is_decoder"):
            part.is_decoder = True
    return config


def _shrunk(config_class: Any, special: dict[str, Any], sizes: dict[str, int]) -> Any:
    default = config_class()
    known = default.to_dict()
    fields: dict[str, Any] = {name: size for name, size in {**SIZES, **sizes}.items() if name in known}
    fields |= {name: None for name in _BY_LAYER if known.get(name) is not None}
    for name in getattr(config_class, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None:
            fields[name] = _shrunk(type(part), SPECIAL.get(part.model_type, {}), sizes).to_dict()
    return config_class(**{**fields, **special})


def make_any(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, in training mode."""
    torch.manual_seed(0)
    try:
        model = auto_class(config).from_config(config, attn_implementation="sdpa")
    except (ValueError, ImportError):
        model = auto_class(config).from_config(config, attn_implementation="eager")
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no fp64
    return model.to(dtype).train()


def lay_any(folder: Path, family: str, spec: Spec, **plan: Any) -> RunDirectory:
    """A run directory for a small model of a family, with the built-in model's tokenizer."""
    model = folder.parent / "model"
    if not model.exists():
        make_any(small_config(family)).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
    architecture = from_config(json.loads((model / "config.json").read_text()))
    reference = ModelReference(name=family, source="local", architecture=architecture)
    run = create_run(folder, spec.model_copy(update={"model": reference}), **plan)
    run.write_assignment(run.assignment().model_copy(update={"model_path": str(model)}))
    return run


def long_rope() -> Any:
    """A small Phi-3 whose positions are scaled in another way beyond 16 tokens (LongRoPE)."""
    from transformers import Phi3Config

    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}
    return Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=260, max_position_embeddings=64,
        original_max_position_embeddings=16, pad_token_id=257, bos_token_id=256, eos_token_id=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0, initializer_range=0.3,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors
        },
    )  # fmt: skip
