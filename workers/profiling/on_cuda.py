"""Simulates a GPU's memory use with fake CPU tensors.

A simulation then needs neither a GPU nor a CUDA build of torch, and gives the same result everywhere. On a
GPU, autocast runs other operators in fp32 (PyTorch documentation, "CUDA Ops that can autocast to float32"),
dropout keeps a mask of bytes, and dropout does not make attention materialise its matrix.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

_HALF = (torch.bfloat16, torch.float16)

_IN_FP32 = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, ("exp", "log", "pow", "rsqrt", "reciprocal", "softmax", "log_softmax", "cumsum", "cumprod",
                 "prod", "sum", "norm", "layer_norm")),
        (Tensor, ("exp", "log", "pow", "__pow__", "rsqrt", "reciprocal", "softmax", "log_softmax", "cumsum",
                  "cumprod", "prod", "sum", "norm")),
        (F, ("softmax", "log_softmax", "layer_norm", "group_norm", "softplus", "normalize")),
    )
    for name in names
)  # fmt: skip


class OnCuda(TorchFunctionMode):
    """Within this mode, operators on CPU tensors use as much memory as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:  # keep the mode active for layers that the backward pass recomputes
            loss: Tensor = args[0]
            with self:
                return _engine_run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(each) for each in args)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    kept: Tensor = torch.native_dropout(input, p, True)[0]
    return kept


def _wide(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.dtype in _HALF else argument
