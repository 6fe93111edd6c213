"""Products of states with weights in fp32 by oneDNN instead of MKL, in the forward pass on processors of AMD.

PyTorch computes these products with MKL, which is made for processors of Intel. oneDNN, which PyTorch
includes as well, is faster on those of AMD, but makes code for each number of rows, which takes about half a
millisecond. So it pays off for weights that are large, or many of the same shape. The products of the
backward pass stay with MKL: there, oneDNN reads the weights in another order, and is slower on some
processors of AMD (CONTRIBUTING.md).

Both libraries give the same up to rounding, and the gradient is compared before the first step, as for other
kernels. What is chosen depends only on the processor, the model, the data and the plan, so that the same job
gives the same bits.
"""

import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from app.contract.spec import Spec
from workers.reporter import Reporter
from workers.training.checkpoints.state import Fallbacks
from workers.training.data.batch_loader import Loader
from workers.training.gradients.direct_sums import DirectSums, Products, Shape
from workers.training.kernels.selection import may_replace_kernels, use_if_it_agrees
from workers.training.replica import Replica

_LEAST_WORK = 1.5e9
"""The least multiplications per micro-batch, over all weights of one shape, at which oneDNN's gain (about 5 %
of the time of the forward pass) outweighs generating code for another number of rows."""


_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that oneDNN and PyTorch read when oneDNN is first used: for how many sizes of products they keep
code and workspace, about a megabyte each. By default, for 1,024."""

_KEPT = 16
"""The layers of a micro-batch share their sizes, so that these are enough for it. The next one usually
has other sizes."""

_MOST_SHAPES = _KEPT - 4
"""The most shapes of weights for which oneDNN is used: some have two sizes, with a bias and without one."""


class OneDnnProducts(Products):
    """The forward pass by oneDNN with weights of some shapes. All other products are PyTorch's own."""

    def __init__(self, shapes: frozenset[Shape]) -> None:
        self._shapes = shapes

    def suits(self, weight: Tensor) -> bool:
        return weight.dtype == torch.float32 and tuple(weight.shape) in self._shapes

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _product(rows, weight, bias) if self.suits(weight) else super().forward(rows, weight, bias)


class OneDnn:
    """The products of a model by oneDNN, as kernels that can be switched on and off."""

    name = "the library oneDNN"
    needs_package = False

    def __init__(self, direct: DirectSums, shapes: frozenset[Shape]) -> None:
        self._direct, self._products = direct, OneDnnProducts(shapes)

    def switch_on(self) -> None:
        self._direct.products = self._products

    def switch_off(self) -> None:
        self._direct.products = Products()


def choose_products(
    replica: Replica,
    loader: Loader,
    spec: Spec,
    fallbacks: Fallbacks,
    reporter: Reporter,
    rows: int,
    *,
    at_start: bool,
) -> None:
    """Lets oneDNN compute products where it is faster, if that leaves the gradient as it is. A resumed run
    uses oneDNN if, and only if, earlier attempts did.

    Args:
        rows: tokens of a usual micro-batch.
        at_start: whether no micro-batch of the run was trained before.
    """
    direct = replica.token_loss.direct
    if direct is None or replica.precision != "fp32" or not may_replace_kernels(replica, spec):
        return
    if at_start:
        shapes = suitable_shapes(direct.shapes(), rows) if _mkl_is_slow() else frozenset()
    else:
        shapes = frozenset((outputs, inputs) for outputs, inputs in fallbacks.onednn_shapes)
    if not shapes:
        return
    for variable in _CACHES:
        os.environ.setdefault(variable, str(_KEPT))
    if not _is_available():
        return
    kernels = OneDnn(direct, shapes)
    if at_start:
        use_if_it_agrees(kernels, replica, loader, reporter)
        fallbacks.onednn_shapes = sorted(map(list, shapes)) if kernels in replica.kernels else []
    else:
        kernels.switch_on()
        replica.kernels = (*replica.kernels, kernels)


def suitable_shapes(shapes: Counter[Shape], rows: int) -> frozenset[Shape]:
    """The shapes of weights with which oneDNN's forward pass is faster, at most `_MOST_SHAPES`.

    Args:
        shapes: how many weights have each shape.
        rows: of a product.
    """
    work = {(outputs, inputs): count * rows * outputs * inputs for (outputs, inputs), count in shapes.items()}
    most = sorted(work, key=lambda shape: work[shape], reverse=True)[:_MOST_SHAPES]
    return frozenset(shape for shape in most if work[shape] >= _LEAST_WORK)


def _is_available() -> bool:
    """Whether this build of PyTorch has oneDNN's products. A run may have begun on another machine."""
    one = torch.ones(2, 2)
    try:
        return torch.equal(_product(one, one, None), one @ one)
    except (AttributeError, RuntimeError):
        return False


def _mkl_is_slow() -> bool:
    """Whether PyTorch computes products by MKL, on a processor of AMD."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:  # another system than Linux
        return False
    return torch.backends.mkl.is_available() and "AuthenticAMD" in processor


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows · weightᵀ + bias, by an operator that PyTorch's compiler uses for linear layers."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return found
