"""Peak memory of one training step by formula: instant, from sizes alone; answers name the source.

Bytes throughout. The terms:

- weights, gradients, optimizer states: parameters × bytes each; Adam keeps two states (Kingma and Ba, 2015).
- activations that a layer keeps for its backward pass (activations.py).
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
from app.planning.activations import (
    SCORES_AT_PEAK,
    attention_scores,
    kept_per_score,
    kept_per_token,
)
from app.planning.families import OWN_LOGITS

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


_KEPT_WITH_ADAPTERS = 0.9
"""What a layer keeps with adapters, relative to full training: frozen layers need no inputs for gradients of
their weights. Simulated for Llama 3.1 8B, Qwen3 4B and GPT-2: 0.79 to 1.02."""

_LOGITS_COPIES = 2.25
"""A chunk's logits in fp32, their gradient, and a margin for those that are scaled or capped."""


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
    scores = attention_scores(architecture, recipe, micro_batch, sequence)
    layer += scores * kept_per_score(architecture, recipe)
    if recipe.gradient_checkpointing:
        # Each layer's input, which is in fp32 under autocast; and either a chunk's logits or one layer, which
        # is computed again once most of the logits are gone.
        inputs = architecture.layers * tokens * architecture.hidden_size * max(stored, width)
        activations = inputs + max(0.0, layer + scores * SCORES_AT_PEAK - chunk / 2)
    else:
        activations = architecture.layers * layer + scores * SCORES_AT_PEAK
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
    checkpointing, there are those of the output head, and later those of one layer at a time."""
    if recipe.precision not in ("bf16", "fp16"):
        return 0
    if recipe.lora is not None:
        return 2 * lora_parameters(architecture, recipe.lora)
    if not recipe.gradient_checkpointing:
        return 2 * architecture.parameters
    embedding = architecture.vocabulary * architecture.hidden_size
    layer = max(0, architecture.parameters - embedding) // architecture.layers
    return 2 * max(0 if recipe.scores else embedding, layer)


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
