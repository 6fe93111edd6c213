"""What fake tensors lack about kernels: their temporary workspace, and operators that they refuse."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten
Target = Literal["cpu", "cuda"]


def workspace_bytes(func: Any, args: tuple[Any, ...], target: Target) -> int:
    """Bytes that an operator's kernel allocates in addition to its outputs; 0 if unknown."""
    rule = _WORKSPACES.get((str(func), target))
    if rule:
        return rule(args)
    return _casts_on_cpu(args) if target == "cpu" and torch.Tag.pointwise in func.tags else 0


def fake_output(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of an operator that fake tensors do not support; None for all other operators."""
    if func is not aten._grouped_mm.default:
        return None
    one: Tensor = args[0]
    other: Tensor = args[1]
    groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape[0]
    if one.ndim == 2 and other.ndim == 2:  # the gradient of the experts' weights
        return one.new_empty(groups, one.shape[0], other.shape[1])
    return one.new_empty(*one.shape[:-1], other.shape[-1])


def _casts_on_cpu(args: tuple[Any, ...]) -> int:
    """On a CPU, operands of different precisions are first copied to a common one
    (aten/src/ATen/TensorIterator.cpp, compute_types); a GPU's kernels cast as they read."""
    operands = [each for each in args if isinstance(each, Tensor) and each.dtype != torch.bool]
    if len({each.dtype for each in operands}) < 2:
        return 0
    common = torch.result_type(operands[0], operands[1])
    return sum(each.numel() * common.itemsize for each in operands if each.dtype != common)


def _flash_backward_on_cuda(args: tuple[Any, ...]) -> int:
    """FlashAttention 2's backward: dQ in fp32 and a row's sum, padded to 128 rows; dK and dV by query head
    where heads are grouped (csrc/flash_attn/flash_api.cpp, mha_bwd)."""
    query: Tensor = args[1]
    key: Tensor = args[2]
    batch, heads, rows, width = query.shape
    padded, wide = -(-rows // 128) * 128, -(-width // 32) * 32
    taken = batch * heads * padded * (wide + 1) * 4
    if key.shape[1] != heads:
        taken += 2 * batch * heads * key.shape[2] * width * key.element_size()
    return taken


def _padded_on_cpu(args: tuple[Any, ...]) -> int:
    """Copies of gradients whose rows cannot be divided evenly among ranks, padded so that they can
    (aten/src/ATen/native/TensorShape.cpp, _pad_chunk); a GPU's kernel pads as it writes."""
    gradients, _, parts = args[:3]
    uneven = [each for each in gradients if len(each) % parts]
    return sum(-(-len(each) // parts) * parts * (each.nbytes // len(each)) for each in uneven)


def _flash_on_cpu(args: tuple[Any, ...]) -> int:
    """A tile of scores, two running rows and a tile of outputs for each thread, in fp32
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention)."""
    query: Tensor = args[0]
    key: Tensor = args[1]
    rows, columns, width = query.shape[2], key.shape[2], query.shape[3]
    row_tile = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    tile = row_tile * min(columns, 512)
    reduced = tile * query.element_size() if query.element_size() == 2 else 0
    return torch.get_num_threads() * (4 * (tile + 2 * row_tile + row_tile * width) + reduced)


def _flash_backward_on_cpu(args: tuple[Any, ...]) -> int:
    """Two tiles of scores for each thread, in fp32 (the same file, cpu_flash_attention_backward)."""
    query: Tensor = args[1]
    key: Tensor = args[2]
    tile = min(query.shape[2], 32) * min(key.shape[2], 512)
    reduced = 2 * tile * query.element_size() if query.element_size() == 2 else 0
    return torch.get_num_threads() * (8 * tile + reduced)


def _product_on_cpu(args: tuple[Any, ...]) -> int:
    """oneDNN's product of matrices in bf16: for each thread a tile of the result in fp32, and the panels of
    the operands that it repacks: always of the right one, and of the left one only if it is transposed
    (src/cpu/x64/matmul/brgemm_matmul.cpp; the largest tiles as measured on PyTorch 2.13)."""
    one, other = args[-2:]
    if one.dtype != torch.bfloat16:
        return 0
    threads = torch.get_num_threads()
    rows, depth, columns = one.shape[0], _up(one.shape[1], 32), other.shape[1]
    tile = min(rows, 256, -(-rows * -(-columns // 64) // threads))
    left = tile * min(depth, 256) * 2 if one.stride(-1) != 1 else 0
    return int(threads * (tile * 64 * 4 + min(depth, 1024) * 64 * 2 + left + 1024))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _chunked_cross_entropy(args: tuple[Any, ...]) -> int:
    """For a chunk: its logits, a value and a hidden state for each row, and a gradient of the weight unless
    the policy is compact. For each position: its target, whether it counts, and its weight
    (torch/nn/modules/linear_cross_entropy.py of PyTorch 2.13)."""
    hidden: Tensor = args[0]
    weight: Tensor = args[1]
    rows, policy, wants_weight = args[8], args[9], args[13]
    width = max(4, weight.element_size())
    share = weight.numel() * width if wants_weight and policy != "compact" else 0
    return int(rows * (weight.shape[0] + 1 + weight.shape[1]) * width + share + hidden.shape[0] * (9 + width))


_WORKSPACES: dict[tuple[str, Target], Callable[[tuple[Any, ...]], int]] = {
    ("aten.mm.default", "cpu"): _product_on_cpu,
    ("aten.addmm.default", "cpu"): _product_on_cpu,
    ("fsdp.chunk_cat.default", "cpu"): _padded_on_cpu,
    ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "cuda"): _flash_backward_on_cuda,
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", "cpu"): _flash_on_cpu,
    ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "cpu"): _flash_backward_on_cpu,
    ("torch_nn._linear_cross_entropy_batch_chunked.default", "cpu"): _chunked_cross_entropy,
    ("torch_nn._linear_cross_entropy_batch_chunked.default", "cuda"): _chunked_cross_entropy,
}
"""Workspace by the operator's name, since some operators are registered on their first use."""
