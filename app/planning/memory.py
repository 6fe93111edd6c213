"""Peak memory of one training step by formula: instant, from sizes alone, and called a formula.

Bytes throughout. The terms:

- weights, gradients, optimizer states: parameters × bytes each; Adam keeps two states (Kingma and Ba, 2015).
- activations that a layer keeps for its backward: after Korthikanti et al., "Reducing Activation
  Recomputation in Large Transformer Models" (2022), section 4.1, counted in elements instead of bytes and
  without the attention matrix, which scaled-dot-product attention does not keep; eager attention does.
- logits: the forward's output, its copy in fp32, the log-probabilities and their gradient; of a chunk of
  the positions where the loss is chunked, with the gradients of the hidden states and of the output head.
"""

from dataclasses import dataclass
from typing import Literal

from app.schemas.architecture import Architecture
from app.schemas.spec import LoraSpec, OptimizerName, RunPrecision

OPTIMIZER_STATES: dict[OptimizerName, float] = {
    "adamw": 2, "adamw_8bit": 0.5, "lion": 1, "lamb": 2, "lars": 1, "sgd": 1, "adafactor": 0.01,
}  # fmt: skip
"""Values that an optimizer keeps for each parameter, of its size: Adafactor's are a row and a column of each
matrix, next to nothing (Shazeer and Stern 2018); 8-bit states are quarter-size."""

_CUDA_CONTEXT = 500 * 2**20
"""What a process holds on a GPU before its first tensor: about half a GiB on recent drivers."""

_CUDA_WORKSPACE = 32 * 2**20
"""cuBLAS's workspace on Hopper, the largest default (PyTorch documentation, CUDA semantics)."""

_CPU_PROCESS = 600 * 2**20
"""Resident memory of a trainer with torch and transformers imported, before its model."""

LOSS_CHUNK = 2**23
LEAST_LOSS_ROWS = 128
"""The chunked loss holds the logits of LOSS_CHUNK / vocabulary positions at a time (training/loss.py)."""

_RESERVED_OVER_ALLOCATED = 1.05
"""Room for the caching allocator's rounding and fragmentation."""


@dataclass(frozen=True)
class Method:
    """What the step is made of, beside the architecture."""

    precision: RunPrecision
    optimizer: OptimizerName
    gradient_checkpointing: bool
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    device: Literal["cpu", "cuda"]
    lora: LoraSpec | None = None
    quantised: bool = False
    """The weights that are not trained are kept in 4 bits."""
    accumulate_in_fp32: bool = True
    accumulate_on_cpu: bool = False
    chunked_loss: bool = True


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
    width = 4 if method.precision in ("fp32", "tf32") else 2
    stored = 2 if method.precision == "pure_bf16" else 4
    parameters = architecture.parameters
    trained = parameters if method.lora is None else lora_parameters(architecture, method.lora.r)
    layer = tokens * kept_per_token(architecture, method) * width
    if method.attention == "eager":
        layer += 2 * micro_batch * architecture.heads * sequence * sequence * width
    if method.gradient_checkpointing:
        activations = architecture.layers * tokens * architecture.hidden_size * width + layer
    else:
        activations = architecture.layers * layer
    autocast_copies = parameters * width if method.precision in ("bf16", "fp16") else 0
    frozen = (parameters - trained) * (0.5 if method.quantised else stored) if method.lora else 0
    adapters = trained * stored if method.lora else 0
    held_in_fp32 = stored == 2 and method.accumulate_in_fp32
    gradient = 0 if method.accumulate_on_cpu and method.device == "cuda" else (4 if held_in_fp32 else stored)
    on_cpu = method.device == "cpu"
    logits = tokens * architecture.vocabulary * (3 * 4 + (width if width == 2 else 0))
    if method.chunked_loss:
        rows = min(tokens, max(LEAST_LOSS_ROWS, LOSS_CHUNK // architecture.vocabulary))
        logits = rows * architecture.vocabulary * 3 * 4 + tokens * architecture.hidden_size * 4
        logits += architecture.vocabulary * architecture.hidden_size * 4 if method.lora is None else 0
    return Memory(
        weights_bytes=int(frozen + adapters if method.lora else parameters * stored) + autocast_copies,
        gradients_bytes=trained * gradient,
        optimizer_bytes=int(trained * stored * OPTIMIZER_STATES[method.optimizer]),
        activations_bytes=activations,
        logits_bytes=logits,
        workspace_bytes=0 if on_cpu else _CUDA_WORKSPACE,
        context_bytes=_CPU_PROCESS if on_cpu else _CUDA_CONTEXT,
    )


def lora_parameters(architecture: Architecture, rank: int) -> int:
    """Adapters' parameters on every linear layer of every block: rank × (inputs + outputs) each."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    query = architecture.heads * architecture.head_dim
    key_value = architecture.key_value_heads * architecture.head_dim
    attention = 2 * (hidden + query) + 2 * (hidden + key_value)
    feed_forward = (3 if architecture.gated else 2) * (hidden + inner)
    return architecture.layers * rank * (attention + feed_forward)


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
