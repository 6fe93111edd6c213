"""Peak memory of one training step by formula: instant, from sizes alone, and called a formula.

Bytes throughout. The terms:

- weights, gradients, optimizer states: parameters × bytes each; Adam keeps two states (Kingma and Ba, 2015).
- activations that a layer keeps for its backward: after Korthikanti et al., "Reducing Activation
  Recomputation in Large Transformer Models" (2022), section 4.1, counted in elements instead of bytes and
  without the attention matrix, which scaled-dot-product attention does not keep; eager attention does.
- logits: the forward's output, its copy in fp32, the log-probabilities and their gradient.
"""

from dataclasses import dataclass
from typing import Literal

from app.schemas.architecture import Architecture

Precision = Literal["fp32", "bf16", "fp16"]

OPTIMIZER_STATES = {"adamw": 2, "sgd": 1}
"""fp32 values that an optimizer keeps for each parameter."""

_CUDA_CONTEXT = 500 * 2**20
"""What a process holds on a GPU before its first tensor: about half a GiB on recent drivers."""

_CUDA_WORKSPACE = 32 * 2**20
"""cuBLAS's workspace on Hopper, the largest default (PyTorch documentation, CUDA semantics)."""

_CPU_PROCESS = 600 * 2**20
"""Resident memory of a trainer with torch and transformers imported, before its model."""

_RESERVED_OVER_ALLOCATED = 1.05
"""Room for the caching allocator's rounding and fragmentation."""


@dataclass(frozen=True)
class Method:
    """What the step is made of, beside the architecture."""

    precision: Precision
    optimizer: Literal["adamw", "sgd"]
    gradient_checkpointing: bool
    attention: Literal["sdpa", "eager"]
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a steady-state step."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    workspace_bytes: int
    context_bytes: int

    @property
    def peak_allocated_bytes(self) -> int:
        """Live tensors; the workspace is the allocator's too."""
        tensors = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes, self.activations_bytes)
        return sum(tensors) + self.logits_bytes + self.workspace_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.peak_allocated_bytes * _RESERVED_OVER_ALLOCATED)

    @property
    def peak_process_bytes(self) -> int:
        return self.peak_reserved_bytes + self.context_bytes


def kept_per_token(architecture: Architecture, method: Method) -> int:
    """Elements that one layer keeps for its backward, per token."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    key_value = 2 * architecture.key_value_heads * architecture.head_dim
    query = architecture.heads * architecture.head_dim
    norms = 4 * hidden  # the input of each norm and its output
    attention = query + key_value + 2 * query  # q, k, v, the output and what the projection takes
    feed_forward = (4 if architecture.gated else 3) * inner
    masks = hidden if architecture.family in {"gpt2", "opt"} else 0  # two dropout masks of bytes
    return norms + attention + feed_forward + masks


def step_memory(architecture: Architecture, method: Method, micro_batch: int, sequence: int) -> Memory:
    """Memory of one steady-state step that accumulates.

    Args:
        micro_batch: rows of the micro-batch.
        sequence: tokens per row.
    """
    tokens = micro_batch * sequence
    width = 4 if method.precision == "fp32" else 2
    parameters = architecture.parameters
    layer = tokens * kept_per_token(architecture, method) * width
    if method.attention == "eager":
        layer += 2 * micro_batch * architecture.heads * sequence * sequence * width
    if method.gradient_checkpointing:
        activations = architecture.layers * tokens * architecture.hidden_size * width + layer
    else:
        activations = architecture.layers * layer
    autocast_copies = parameters * width if method.precision != "fp32" else 0
    on_cpu = method.device == "cpu"
    return Memory(
        weights_bytes=parameters * 4 + autocast_copies,
        gradients_bytes=parameters * 4,
        optimizer_bytes=parameters * 4 * OPTIMIZER_STATES[method.optimizer],
        activations_bytes=activations,
        logits_bytes=tokens * architecture.vocabulary * (3 * 4 + (width if width == 2 else 0)),
        workspace_bytes=0 if on_cpu else _CUDA_WORKSPACE,
        context_bytes=_CPU_PROCESS if on_cpu else _CUDA_CONTEXT,
    )


def largest_micro_batch(
    architecture: Architecture, method: Method, sequence: int, budget_bytes: int, at_most: int = 2**20
) -> int:
    """The most rows whose predicted process memory is within the budget; 0 where not even one fits."""
    if step_memory(architecture, method, 1, sequence).peak_process_bytes > budget_bytes:
        return 0
    low, high = 1, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if step_memory(architecture, method, middle, sequence).peak_process_bytes <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low
