"""Peak memory of one training step by formula: instant, from sizes alone; answers name the source.

Bytes throughout. The terms:

- weights, gradients, optimizer states: parameters × bytes each; Adam keeps two states (Kingma and Ba, 2015).
- activations that a layer keeps for its backward: after Korthikanti et al., "Reducing Activation
  Recomputation in Large Transformer Models" (2022), section 4.1, without the attention matrix, which
  scaled-dot-product attention does not keep (eager attention does), and with the residual stream and the
  norms in fp32, as autocast leaves them. Families that keep more or less than Llama: `_KEPT_BY_FAMILY`.
- logits: a chunk's logits in fp32, and their gradient; and the gradients of the hidden states
  and of the output head, which the chunked loss computes already in the forward pass.
"""

from typing import Literal

from pydantic import Field, computed_field

from app.contract.architecture import Architecture
from app.contract.base import Frozen
from app.contract.loss_chunks import rows_of_chunk
from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.contract.spec import OptimizerName, Spec
from app.planning.families import OWN_LOGITS, WITHOUT_SDPA

OPTIMIZER_STATES: dict[OptimizerName, float] = {
    "adamw": 2, "adamw_8bit": 0.5, "lion": 1, "lamb": 2, "lars": 1, "sgd": 1, "adafactor": 0.01,
}  # fmt: skip
"""Optimizer states per parameter, in multiples of a parameter's bytes: Adafactor keeps one row and one column
per matrix, almost nothing (Shazeer and Stern 2018); 8-bit states take a quarter each."""

_CUDA_CONTEXT = 750 * 2**20
"""What a process holds on a GPU besides tensors, where the worker has not measured it
(workers/cuda_context.py). Measured on an H200 (driver 580, CUDA 13.0): 682 MiB for two matrix products, 749
MiB after a backward pass, for which more kernels are loaded."""

_CUDA_WORKSPACE = 2 * 32 * 2**20
"""cuBLAS's workspaces on Hopper, the largest by default (PyTorch documentation, CUDA semantics): one for each
thread that multiplies matrices, which are that of the forward and that of the backward pass. On an H200, the
allocator held exactly these two."""

_CPU_PROCESS = 600 * 2**20
"""Resident memory of a trainer with torch and transformers imported, before its model."""

_CHECKPOINTS = 3
"""Two checkpoints, and one that is being written; with validation data, there is also the best one."""


class Memory(Frozen):
    """Bytes at the peak of a steady-state step."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    workspace_bytes: int
    context_bytes: int
    reserved_over_allocated: float = Field(1.05, exclude=True)
    """The ratio of reserved to allocated bytes; the default leaves room for rounding and fragmentation."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_allocated_bytes(self) -> int:
        """Live tensors and the workspace, which also comes from the allocator."""
        tensors = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes, self.activations_bytes)
        return sum(tensors) + self.logits_bytes + self.workspace_bytes

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.peak_allocated_bytes * self.reserved_over_allocated)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_process_bytes(self) -> int:
        return self.peak_reserved_bytes + self.context_bytes


_NORM_BYTES, _NORM_BYTES_FP32 = 24, 28
"""Bytes per token and unit of width that the two norms of a layer keep, with the residual stream in fp32: in
half precision by autocast, and in fp32. Fitted to the simulation of Llama, Mistral, Qwen 2 and Phi 3, of
which the formula then gives all activations within 3 %."""

_KEPT_BY_FAMILY: dict[str, tuple[float, float]] = {
    "gpt2": (1.45, 1.15), "llama": (1.0, 1.0), "qwen2": (1.0, 1.0), "mistral": (1.0, 1.0),
    "phi3": (1.0, 1.05), "qwen3": (1.25, 1.2), "qwen3_moe": (1.46, 1.0), "mixtral": (1.6, 1.0),
    "gemma2": (1.3, 1.12), "gemma3_text": (1.57, 1.25), "gpt_neox": (0.7, 0.8), "opt": (0.6, 0.55),
    "bloom": (0.55, 0.65),
    "falcon": (1.3, 1.0), "gpt_oss": (1.8, 1.25), "qwen2_moe": (1.35, 1.0), "qwen3_next": (1.4, 1.0),
    "olmo": (0.9, 0.9), "olmo2": (1.25, 1.15), "olmo3": (1.35, 1.15), "olmoe": (1.7, 1.25),
    "cohere": (1.0, 0.9), "starcoder2": (0.8, 0.8), "stablelm": (0.95, 0.95), "granite": (1.05, 1.0),
    "glm": (1.05, 1.05), "smollm3": (1.05, 1.0), "nemotron": (0.8, 1.2), "mamba": (11.0, 6.7),
    "falcon_mamba": (11.0, 6.7), "mpt": (0.75, 0.85),
}  # fmt: skip
"""What a layer keeps, relative to the formula for Llama, in half precision and in fp32. As simulated for
models of the catalogue (tests/profiling/test_formula.py), and for small ones of the other families."""

_KEPT_BY_OTHERS = (1.4, 1.2)

_KEPT_WITH_ADAPTERS = 0.9
"""What a layer keeps with adapters, relative to full training: frozen layers need no inputs for gradients of
their weights. Simulated for Llama 3.1 8B, Qwen3 4B and GPT-2: 0.79 to 1.02."""

_LOGITS_COPIES = 2.25
"""A chunk's logits in fp32, their gradient, and a margin for those that are scaled or capped."""

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

_SCORES_AT_PEAK = 8
"""Bytes for each score that the backward pass of one layer takes in addition. As simulated: 6 to 10."""


def kept_per_token(architecture: Architecture, recipe: Recipe) -> float:
    """Bytes that one layer keeps for its backward, per token."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    key_value = 2 * architecture.key_value_heads * architecture.head_dim
    query = architecture.heads * architecture.head_dim
    is_fp32 = recipe.precision in ("fp32", "tf32")
    norms = hidden * (_NORM_BYTES_FP32 if is_fp32 else _NORM_BYTES)
    attention = query + key_value + 2 * query  # q, k, v, the output and what the projection takes
    feed_forward = (4 if architecture.gated else 3) * inner * architecture.active_experts
    if architecture.experts > 1:
        # An expert's input, its output, and its output multiplied by the routing weight.
        feed_forward += 3 * hidden * architecture.active_experts
    relative = _KEPT_BY_FAMILY.get(architecture.family, _KEPT_BY_OTHERS)[is_fp32]
    return relative * (norms + (4 if is_fp32 else 2) * (attention + feed_forward))


def step_memory(architecture: Architecture, recipe: Recipe, micro_batch: float, sequence: int) -> Memory:
    """Memory of one steady-state step that accumulates.

    Args:
        micro_batch: rows of the micro-batch.
        sequence: tokens per row.
    """
    tokens = micro_batch * sequence
    width = 4 if recipe.precision in ("fp32", "tf32") else 2
    stored = 2 if recipe.precision == "pure_bf16" else 4
    parameters = architecture.parameters
    trained = parameters if recipe.lora is None else lora_parameters(architecture, recipe.lora)
    chunk, logits = _logits(architecture, recipe, tokens)
    layer = tokens * kept_per_token(architecture, recipe)
    if recipe.lora is not None:
        layer *= _KEPT_WITH_ADAPTERS
    attention_scores = 0.0
    if recipe.attention == "eager" or (recipe.attention == "sdpa" and architecture.family in WITHOUT_SDPA):
        attention_scores = micro_batch * architecture.heads * sequence * sequence
        layer += attention_scores * _SCORES_KEPT.get(architecture.family, _SCORES_KEPT_BY_OTHERS)[width == 4]
    if recipe.gradient_checkpointing:
        # Each layer's input, which is in fp32 under autocast; and either a chunk's logits or one layer, which
        # is computed again once most of the logits are gone.
        inputs = architecture.layers * tokens * architecture.hidden_size * max(stored, width)
        activations = inputs + max(0.0, layer + attention_scores * _SCORES_AT_PEAK - chunk / 2)
    else:
        activations = architecture.layers * layer + attention_scores * _SCORES_AT_PEAK
    weights = (
        _frozen_weight_bytes(architecture, recipe, stored) + trained * stored
        if recipe.lora
        else parameters * stored
    ) + copies_in_half_precision(architecture, recipe)
    held_in_fp32 = stored == 2 and recipe.accumulate_in_fp32
    gradient = 0 if recipe.accumulate_on_cpu and recipe.device == "cuda" else (4 if held_in_fp32 else stored)
    states = OPTIMIZER_STATES[recipe.optimizer]
    if recipe.optimizer == "sgd" and not recipe.momentum:
        states = 0
    if recipe.optimizer_on_cpu:
        states = 0
    return Memory(
        weights_bytes=int(weights),
        gradients_bytes=trained * gradient,
        optimizer_bytes=int(trained * stored * states),
        activations_bytes=int(activations),
        logits_bytes=int(chunk + logits),
        workspace_bytes=workspace_bytes(recipe.device),
        context_bytes=context_bytes(recipe),
    )


def copies_in_half_precision(architecture: Architecture, recipe: Recipe) -> int:
    """Bytes of autocast's copies of the trained weights, which the backward pass needs. With gradient
    checkpointing, those of one layer are made at a time, and only that of the output head counts, which is
    there at the peak."""
    if recipe.precision not in ("bf16", "fp16"):
        return 0
    if recipe.lora is not None:
        return 2 * lora_parameters(architecture, recipe.lora)
    if recipe.gradient_checkpointing:
        return 2 * architecture.vocabulary * architecture.hidden_size
    return 2 * architecture.parameters


def _logits(architecture: Architecture, recipe: Recipe, tokens: float) -> tuple[float, float]:
    """Bytes of a chunk's logits, and of what the loss keeps for the backward pass: the gradients of the
    hidden states and of the output head. None if sequences are scored, whose layer is far smaller."""
    if recipe.scores:
        return 0.0, 0.0
    rows = min(tokens, rows_of_chunk(architecture.vocabulary, recipe.device))
    rows = tokens if architecture.family in OWN_LOGITS else rows
    head = architecture.vocabulary * architecture.hidden_size * 4 if recipe.lora is None else 0
    return rows * architecture.vocabulary * _LOGITS_COPIES * 4, tokens * architecture.hidden_size * 4 + head


def _frozen_weight_bytes(architecture: Architecture, recipe: Recipe, stored: int) -> float:
    """Bytes of the frozen weights: linear layers in autocast's precision or in 4 bits; experts (one
    tensor) and embeddings in their own precision, the embeddings with a cast copy for an output head that may
    share them (workers/training/models/precision.py)."""
    embedding = architecture.vocabulary * architecture.hidden_size
    experts = _layers_with_experts(architecture) * _experts_of_layer(architecture)
    linear = max(0, architecture.parameters - embedding - experts)
    casts = recipe.precision in ("bf16", "fp16")
    keeps_all = recipe.lora is not None and recipe.lora.merge
    if recipe.quantised:
        return 0.5 * linear + stored * experts + (stored + 2 * casts) * embedding
    if casts and not keeps_all:
        return 2 * linear + stored * experts + (stored + 2) * embedding
    copied = embedding if recipe.gradient_checkpointing else architecture.parameters
    return stored * architecture.parameters + 2 * casts * copied


def lora_parameters(architecture: Architecture, lora: LoraSpec) -> int:
    """Parameters of adapters on every linear layer of every block: rank × (inputs + outputs) each. Every
    expert has its own, for gate and feed-forward layer together; with dropout, experts have none."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    query = architecture.heads * architecture.head_dim
    key_value = architecture.key_value_heads * architecture.head_dim
    attention = 2 * (hidden + query) + 2 * (hidden + key_value)
    if architecture.experts == 1:
        feed_forward = architecture.layers * (3 if architecture.gated else 2) * (hidden + inner)
    elif lora.dropout:
        feed_forward = 0
    else:
        one = (hidden + (2 if architecture.gated else 1) * inner) + (inner + hidden)
        feed_forward = int(_layers_with_experts(architecture) * architecture.experts * one)
    return lora.r * (architecture.layers * attention + feed_forward)


def _experts_of_layer(architecture: Architecture) -> int:
    """Parameters of the experts of a layer that has them."""
    if architecture.experts == 1:
        return 0
    one = (3 if architecture.gated else 2) * architecture.hidden_size * architecture.intermediate_size
    return architecture.experts * one


def _layers_with_experts(architecture: Architecture) -> float:
    """About how many layers have experts: all, or fewer if those would have more parameters than the whole
    model, as in families in which only every second layer has experts."""
    rest = architecture.parameters - architecture.vocabulary * architecture.hidden_size
    own = _experts_of_layer(architecture)
    return min(architecture.layers, max(0, rest) / own) if own else 0


def bytes_on_disk(spec: Spec) -> int:
    """The most that a job writes to disk: its checkpoints, one of them in progress, and the model."""
    lora = spec.method.lora
    saved = spec.model.architecture.parameters if lora is None or lora.merge else _trained_parameters(spec)
    checkpoints = _CHECKPOINTS + (spec.data.validation is not None)
    return checkpoints * checkpoint_bytes(spec) + _models_of(spec) * 4 * saved


def checkpoint_bytes(spec: Spec) -> int:
    """The size of a job's checkpoint: trained parameters and the optimizer's states in fp32, of each model
    that it trains."""
    own = int(_trained_parameters(spec) * 4 * (1 + OPTIMIZER_STATES[spec.optimizer.name]))
    return _models_of(spec) * own


def _models_of(spec: Spec) -> int:
    return spec.split.devices if spec.strategy == "independent" else 1


def _trained_parameters(spec: Spec) -> int:
    architecture, lora = spec.model.architecture, spec.method.lora
    return architecture.parameters if lora is None else lora_parameters(architecture, lora)


def workspace_bytes(device: Literal["cpu", "cuda"]) -> int:
    """Memory that libraries such as cuBLAS take from the allocator as workspace."""
    return _CUDA_WORKSPACE if device == "cuda" else 0


def context_bytes(recipe: Recipe) -> int:
    """Memory of a process besides its tensors."""
    if recipe.context_bytes is not None:
        return recipe.context_bytes
    return _CUDA_CONTEXT if recipe.device == "cuda" else _CPU_PROCESS
