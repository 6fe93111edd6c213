"""Which kernel of scaled dot-product attention runs on a GPU.

- cuDNN's is off: it is planned for each exact shape, and micro-batches rarely have the same shape twice.
- Flash attention runs in bf16 and fp16, and has a deterministic backward pass.
- In fp32 and tf32 only the memory-efficient kernel and the plain one (math) can run. The former does not take
  grouped heads as such, so keys and values are repeated for it; its backward pass is not deterministic, so
  that deterministic training uses the plain one, which holds all scores in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from app.contract.spec import RunPrecision

_FLASH: tuple[RunPrecision, ...] = ("bf16", "fp16", "pure_bf16")


def choose_kernels(precision: RunPrecision, *, deterministic: bool) -> None:
    """Chooses the kernels for all attention of this process on a GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    if repeats_heads("cuda", precision):
        from transformers.integrations import sdpa_attention

        sdpa_attention.use_gqa_in_sdpa = _never


def repeats_heads(device: Literal["cpu", "cuda"], precision: RunPrecision) -> bool:
    """Whether grouped keys and values are repeated, one for each head, before the kernel runs."""
    return device == "cuda" and precision not in _FLASH


@contextmanager
def heads_repeated(device: Literal["cpu", "cuda"], precision: RunPrecision) -> Iterator[None]:
    """Within the block, transformers' sdpa attention treats grouped heads as it does in a trainer on such a
    device; for the simulation, whose process runs steps for several devices."""
    from transformers.integrations import sdpa_attention

    own = sdpa_attention.use_gqa_in_sdpa
    if repeats_heads(device, precision):
        sdpa_attention.use_gqa_in_sdpa = _never
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = own


def _never(*_: object, **__: object) -> bool:
    return False
