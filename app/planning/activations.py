"""What a layer keeps for its backward pass, by formula, and how that differs between families.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1,
without the attention matrix, which scaled-dot-product attention does not keep (eager attention does), and
with the residual stream and the norms in fp32, as autocast leaves them.
"""

from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.planning.families import WITHOUT_SDPA

_NORM_BYTES, _NORM_BYTES_FP32 = 24, 28
"""Bytes per token and unit of width that the two norms of a layer keep, with the residual stream in fp32: in
half precision by autocast, and in fp32. Fitted to the simulation of Llama, Mistral, Qwen 2 and Phi 3, of
which the formula then gives all activations within 3 %."""

_KEPT_BY_FAMILY: dict[str, tuple[float, float]] = {
    "afmoe": (1.9, 1.15), "apertus": (1.65, 1.45), "arcee": (0.8, 0.75), "aria": (1.65, 1.15),
    "aria_text": (1.65, 1.15), "axk1": (1.85, 1.05), "axk2": (2.15, 1.25), "bamba": (5.1, 4.75),
    "bart": (0.7, 0.7), "bert": (0.7, 0.7), "bert-generation": (0.7, 0.7), "big_bird": (2.35, 1.5),
    "biogpt": (0.7, 0.7), "bitnet": (1.5, 1.35), "blenderbot": (0.7, 0.7), "blenderbot-small": (0.7, 0.7),
    "bloom": (0.55, 0.65), "cohere": (1.0, 0.9), "cohere2": (0.95, 0.85), "ctrl": (0.5, 0.5),
    "cwm": (1.0, 1.0), "deepseek_v3": (2.0, 1.15), "deepseek_v32": (2.0, 1.15), "deepseek_vl": (1.0, 0.95),
    "deepseek_vl_hybrid": (1.0, 0.95), "diffllama": (1.3, 1.15), "doge": (1.75, 1.4),
    "ernie4_5": (1.0, 1.05), "exaone4": (1.15, 1.1), "exaone_moe": (1.5, 0.9), "falcon": (1.3, 1.0),
    "falcon_h1": (3.95, 3.8), "falcon_mamba": (11.0, 6.7), "flex_olmo": (1.8, 1.0), "gemma": (1.0, 0.95),
    "gemma2": (1.3, 1.12), "gemma3": (1.45, 1.25), "gemma3_text": (1.57, 1.25), "gemma4": (1.75, 1.45),
    "glm": (1.05, 1.05), "glm4": (1.25, 1.2), "glm4_moe": (1.4, 0.85), "glm4_moe_lite": (1.8, 1.25),
    "gpt2": (1.45, 1.15), "gpt_bigcode": (0.6, 0.65), "gpt_neox": (0.7, 0.8), "gpt_oss": (1.8, 1.25),
    "granite": (1.05, 1.0), "granitemoe": (1.5, 0.9), "granitemoehybrid": (4.25, 3.25),
    "granitemoeshared": (1.5, 0.9), "helium": (1.0, 0.95), "internlm3": (1.0, 1.0), "internvl": (1.0, 0.95),
    "laguna": (1.6, 1.15), "lfm2": (1.15, 1.1), "llama": (1.0, 1.0), "llama4": (1.05, 0.95),
    "llama4_text": (1.05, 0.95), "llava": (1.0, 0.95), "mamba": (11.0, 6.7), "mamba2": (2.8, 2.35),
    "minicpm3": (2.0, 1.55), "minimax_m2": (1.55, 1.0), "ministral3": (1.0, 1.0), "mistral": (1.0, 1.0),
    "mistral3": (1.0, 1.0), "mixtral": (1.6, 1.0), "mllama": (0.8, 0.8), "modernbert-decoder": (0.8, 0.8),
    "mpt": (0.75, 0.85), "nanochat": (0.8, 0.75), "nemotron": (0.8, 1.2), "nemotron_h": (1.15, 1.0),
    "olmo": (0.9, 0.9), "olmo2": (1.25, 1.15), "olmo3": (1.35, 1.15), "olmoe": (1.7, 1.25),
    "opt": (0.6, 0.55), "persimmon": (0.9, 0.8), "phi": (1.5, 1.15), "phi3": (1.0, 1.05),
    "phi4_multimodal": (1.0, 1.05), "phimoe": (1.3, 0.85), "qwen2": (1.0, 1.0), "qwen2_5_vl": (1.0, 1.0),
    "qwen2_moe": (1.35, 1.0), "qwen2_vl": (1.0, 1.0), "qwen3": (1.25, 1.2), "qwen3_moe": (1.46, 1.0),
    "qwen3_next": (1.4, 1.0), "qwen3_vl": (1.15, 1.1), "seed_oss": (1.0, 1.05), "smollm3": (1.05, 1.0),
    "smolvlm": (1.0, 0.95), "solar_open": (1.4, 0.9), "stablelm": (0.95, 0.95), "starcoder2": (0.8, 0.8),
    "youtu": (1.7, 1.4), "zaya": (1.95, 1.4),
}  # fmt: skip
"""What a layer keeps, relative to the formula for Llama, in half precision and in fp32. As simulated for
models of the catalogue (tests/profiling/test_formula.py), and for the other families with their default
sizes. `python -m tests.harness.kept_activations` simulates families and prints their entries."""

_KEPT_BY_OTHERS = (1.4, 1.2)

_ALL_EXPERTS = ("llama4", "llama4_text")
"""Families in which each token goes through all experts; those that were not chosen get zeros as input. (If
only some layers have experts, as in Llama 4 Maverick, this counts too much.)"""

_SCORES_KEPT_BY_OTHERS = (6, 4)
"""Bytes that a layer of eager attention keeps for each score (a pair of positions of a head), in half
precision and in fp32: the softmax in fp32 and, in half precision, its cast copy. As simulated for small
models of the families without sdpa attention."""

_SCORES_KEPT: dict[str, tuple[int, int]] = {
    "gemma2": (8, 8), "vaultgemma": (8, 8), "granite_swa": (12, 10),
    "granitemoe_swa": (12, 10), "hy_v4": (8, 5), "xglm": (10, 9),
}  # fmt: skip
"""Those of families that keep more: the result of a soft cap on scores (Gemma 2), or further copies. As
simulated, too."""

SCORES_AT_PEAK = 8
"""Bytes for each score that the backward pass of one layer takes in addition. As simulated: 6 to 10."""


def kept_per_token(architecture: Architecture, recipe: Recipe) -> float:
    """Bytes that one layer keeps for its backward, per token."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    key_value = 2 * architecture.key_value_heads * architecture.head_dim
    query = architecture.heads * architecture.head_dim
    is_fp32 = recipe.precision in ("fp32", "tf32")
    norms = hidden * (_NORM_BYTES_FP32 if is_fp32 else _NORM_BYTES)
    attention = query + key_value + 2 * query  # q, k, v, the output and what the projection takes
    experts = architecture.experts if architecture.family in _ALL_EXPERTS else architecture.active_experts
    feed_forward = (4 if architecture.gated else 3) * inner * experts
    if architecture.experts > 1:
        # An expert's input, its output, and its output multiplied by the routing weight.
        feed_forward += 3 * hidden * experts
    kept = norms + (4 if is_fp32 else 2) * (attention + feed_forward)
    return kept_by_family(architecture.family, recipe) * kept


def kept_by_family(family: str, recipe: Recipe) -> float:
    """What a family's layer keeps, relative to the formula for Llama."""
    return _KEPT_BY_FAMILY.get(family, _KEPT_BY_OTHERS)[recipe.precision in ("fp32", "tf32")]


def attention_scores(architecture: Architecture, recipe: Recipe, rows: float, sequence: int) -> float:
    """How many scores (pairs of positions of a head) eager attention computes in a layer; 0 without it."""
    eager = recipe.attention == "eager"
    if eager or (recipe.attention == "sdpa" and architecture.family in WITHOUT_SDPA):
        return rows * architecture.heads * sequence * sequence
    return 0.0


def kept_per_score(architecture: Architecture, recipe: Recipe) -> int:
    """Bytes that a layer of eager attention keeps for each score."""
    is_fp32 = recipe.precision in ("fp32", "tf32")
    return _SCORES_KEPT.get(architecture.family, _SCORES_KEPT_BY_OTHERS)[is_fp32]
