"""Which kernel of scaled dot-product attention runs on a GPU, and what it needs to know of packed rows.

- cuDNN's is off: it is planned for each exact shape, and micro-batches rarely have the same shape twice.
- Flash attention runs in bf16 and fp16, and has a deterministic backward pass.
- In fp32 and tf32 only the memory-efficient kernel and the plain one (math) can run. The former does not take
  grouped heads as such, so keys and values are repeated for it; its backward pass is not deterministic, so
  that deterministic training uses the plain one, which holds all scores in memory.
- GPUs without bf16 (before compute capability 8.0) have no flash attention either, so that the same is true
  of fp16 there.
- transformers looks for packed rows in the position ids of every forward pass: it waits for the device, or,
  while torch.compile traces the model, assumes that there are some, and passes a mask, which flash attention
  does not take. The trainer knows which rows are packed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from app.contract.spec import RunPrecision

_FLASH: tuple[RunPrecision, ...] = ("bf16", "fp16", "pure_bf16")
_FIRST_WITH_FLASH = (8, 0)
"""The compute capability from which GPUs have flash attention."""


def choose_kernels(precision: RunPrecision, *, deterministic: bool) -> None:
    """Chooses the kernels for all attention of this process on its current GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    flash = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _FIRST_WITH_FLASH
    _set_repeated_heads(repeats_heads("cuda", precision, flash=flash))


def _set_repeated_heads(repeats: bool) -> None:
    """Lets transformers' sdpa attention repeat grouped heads, or treat them in its own way."""
    from transformers.integrations import sdpa_attention

    own = getattr(sdpa_attention.use_gqa_in_sdpa, "own", sdpa_attention.use_gqa_in_sdpa)
    if not repeats:
        sdpa_attention.use_gqa_in_sdpa = own
        return

    def never(*_: object, **__: object) -> bool:
        return False

    never.own = own  # type: ignore[attr-defined]
    sdpa_attention.use_gqa_in_sdpa = never


def repeats_heads(device: Literal["cpu", "cuda"], precision: RunPrecision, *, flash: bool = True) -> bool:
    """Whether grouped keys and values are repeated, one for each head, before the kernel runs.

    Args:
        flash: whether the GPU has flash attention.
    """
    return device == "cuda" and not (flash and precision in _FLASH)


@contextmanager
def heads_repeated(
    device: Literal["cpu", "cuda"], precision: RunPrecision, *, flash: bool = True
) -> Iterator[None]:
    """Within the block, transformers' sdpa attention treats grouped heads as it does in a trainer on such a
    device; for the simulation, whose process runs steps for several devices."""
    from transformers.integrations import sdpa_attention

    own = sdpa_attention.use_gqa_in_sdpa
    _set_repeated_heads(repeats_heads(device, precision, flash=flash))
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = own


_packed: bool | None = None
"""Whether the rows of the running forward pass are packed; None: not known, or no pass is running."""


@contextmanager
def rows_known(*, packed: bool) -> Iterator[None]:
    """Within the block, transformers does not look for packed rows itself.

    Args:
        packed: whether rows hold several samples, each with positions from 0; otherwise a row holds one.
    """
    global _packed
    masks: Any = sys.modules.get("transformers.masking_utils")  # None: no model of transformers exists
    if masks is not None and not hasattr(masks.find_packed_sequence_indices, "searches"):
        masks.find_packed_sequence_indices = _unless_known(masks.find_packed_sequence_indices)
    before, _packed = _packed, packed
    try:
        yield
    finally:
        _packed = before


def _unless_known(search: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Tells which tokens of a row belong together (shape: rows × sequence), or None if all of them do; calls
    `search` if it is not known whether rows are packed."""

    def find(position_ids: Tensor) -> Tensor | None:
        if _packed is None:
            return search(position_ids)
        if not _packed:
            return None
        before = torch.cat([position_ids[:, :1] - 1, position_ids[:, :-1]], dim=-1)
        return (position_ids != before + 1).cumsum(-1)  # a sample begins where positions do not go on

    find.searches = search  # type: ignore[attr-defined]
    return find
