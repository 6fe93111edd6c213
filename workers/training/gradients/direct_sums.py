"""Adds the gradients of large weights to their sums inside the operations that compute them.

By itself, autograd computes each weight's gradient of a micro-batch as a tensor of its own, and then adds
that tensor to the sum in `grad`. A matrix product can add its result to a matrix instead (BLAS's `beta` of
1), and an embedding needs to change only the rows of tokens that occur. That saves time, most with small
micro-batches and large vocabularies, and the memory of a weight. Megatron-LM calls it gradient accumulation
fusion.

Gradients are the same up to rounding. The comparison before the first step (`certificate.py`) computes its
reference without this module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

LEAST_ELEMENTS = 2**16
"""Smaller weights are left to autograd: calling Python takes longer than adding them."""


Shape = tuple[int, int]
"""Of a weight: (outputs, inputs)."""


class Products:
    """The forward pass of a linear layer, as PyTorch computes it."""

    def suits(self, weight: Tensor) -> bool:
        """Whether products with a weight are computed in another way than PyTorch does by itself."""
        return False

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rows · weightᵀ + bias, of shape (rows, outputs)."""
        return F.linear(rows, weight, bias)


class DirectSums:
    """The large weights of a model whose gradients are added directly, while a window is open. Products with
    large weights that are not trained can be computed by another library, too.

    Args:
        model: its trained weights are on a CPU, and nothing but `grad` holds their sums.
    """

    def __init__(self, model: nn.Module) -> None:
        head_of: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = head_of()
        self._of_head = set() if head is None else {id(each) for each in head.parameters()}
        self.products = Products()
        """Computes products with these weights."""
        self._forwards = [
            (module, partial(forward, self, module))
            for module in model.modules()
            if (forward := _forward_of(module)) is not None
        ]
        self._weights = {id(module.weight) for module, _ in self._forwards if module.weight.requires_grad}
        self._replaced: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self.loss_factor: float | None = None
        """What the sum of the token losses is multiplied by in the open window; None: no window is open."""
        self._is_suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leaves windows that are opened within it to autograd."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def begin(self, loss_factor: float) -> None:
        """Adds gradients directly from now on.

        Args:
            loss_factor: what each micro-batch's summed loss is multiplied by before its backward pass.
        """
        if self._is_suspended:
            return
        if self.loss_factor is None:
            self._replaced = [(each, forward) for each, forward in self._forwards if self._computes(each)]
            for module, forward in self._replaced:
                module.forward = forward
        self.loss_factor = loss_factor

    def end(self) -> None:
        """Leaves gradients to autograd again."""
        if self.loss_factor is not None:
            for module, _ in self._replaced:
                del module.forward
        self.loss_factor = None

    def _computes(self, module: nn.Module) -> bool:
        """Whether a layer's weight is trained, or its products are computed in another way."""
        weight: Any = module.weight
        is_suitable = not isinstance(module, nn.Embedding) and self.products.suits(_matrix_of(module))
        return weight.requires_grad or is_suitable

    def shapes(self) -> Counter[Shape]:
        """How many weights of matrix products have each shape, without those that are the output head's."""
        found: Counter[Shape] = Counter()
        for module, _ in self._forwards:
            if not isinstance(module, nn.Embedding) and id(module.weight) not in self._of_head:
                outputs, inputs = _matrix_of(module).shape
                found[outputs, inputs] += 1
        return found

    def factor_for(self, weight: Tensor) -> float | None:
        """The loss factor, if the gradient of an output head's weight is to be added directly."""
        return self.loss_factor if id(weight) in self._weights else None


def _matrix_of(module: nn.Module) -> Tensor:
    """The weight of a layer that computes products, of shape (outputs, inputs)."""
    weight: Any = module.weight
    found: Tensor = weight if isinstance(module, nn.Linear) else weight.t()
    return found


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass that adds a layer's gradient directly; None if autograd is to do it."""
    kind = type(module)
    if kind not in _FORWARDS or "forward" in vars(module):  # another library has replaced it
        return None
    weight: Any = module.weight
    large = weight.numel() >= LEAST_ELEMENTS and weight.dtype in (torch.float32, torch.float64)
    if not (isinstance(weight, nn.Parameter) and large):
        return None
    if not weight.requires_grad:
        is_alone = not any(each.requires_grad for each in module.parameters())
        return _FORWARDS[kind] if is_alone and kind is not nn.Embedding else None
    if any(_has_hooks(parameter) for parameter in module.parameters()):  # they would not see the gradient
        return None
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        return None
    return _FORWARDS[kind]


def _has_hooks(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# The arguments below have the names that they have in the methods replaced, since callers may use the names.


def _linear(sums: DirectSums, module: nn.Linear, input: Tensor) -> Tensor:
    if not _is_usable(input, module.weight):
        return nn.Linear.forward(module, input)
    return _product(input, module, sums.products, is_transposed=False)


def _conv1d(sums: DirectSums, module: Any, x: Tensor) -> Tensor:
    """GPT-2's layer, whose weight has the shape (inputs, outputs)."""
    if not _is_usable(x, module.weight):
        plain: Tensor = Conv1D.forward(module, x)
        return plain
    return _product(x, module, sums.products, is_transposed=True)


def _product(given: Tensor, module: Any, products: Products, *, is_transposed: bool) -> Tensor:
    kind = _Product if module.weight.requires_grad else _FrozenProduct
    found: Tensor = kind.apply(given, module.weight, module.bias, is_transposed, products)  # type: ignore[no-untyped-call]
    return found


def _embedding(sums: DirectSums, module: nn.Embedding, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return nn.Embedding.forward(module, input)
    found: Tensor = _Lookup.apply(input, module.weight, module.padding_idx)  # type: ignore[no-untyped-call]
    return found


_FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    Conv1D: _conv1d,
    nn.Embedding: _embedding,
}


def _is_usable(given: Tensor, weight: Tensor) -> bool:
    """Whether a product is computed in the weight's precision, and has a gradient."""
    autocast = torch.is_autocast_enabled(given.device.type)
    return torch.is_grad_enabled() and not autocast and given.dtype == weight.dtype


def sum_of(weight: Tensor) -> Tensor:
    """The sum of a weight's gradients, to be added to; zero at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of two matrices to the sum of a weight's gradients."""
    if weight.grad is None:
        weight.grad = left @ right
    else:
        weight.grad.addmm_(left, right)


def _owned(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows in another shape, as a tensor that autograd does not treat as a view: some models change the
    output of a layer in place."""
    found: Tensor = torch.ops.aten._unsafe_view(rows, [*shape, rows.shape[-1]])
    return found


class _Product(torch.autograd.Function):
    """given · weightᵀ + bias, or given · weight + bias if the weight is transposed."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, products: Products
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.bias, ctx.transposed = weight, bias, transposed
        rows = given.reshape(-1, given.shape[-1])
        found = products.forward(rows, weight.t() if transposed else weight, bias)
        return _owned(found, given.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> Any:
        (given,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        rows, columns = given.reshape(-1, given.shape[-1]), upper.reshape(-1, upper.shape[-1])
        if ctx.transposed:
            add_product(weight, rows.t(), columns)
        else:
            add_product(weight, columns.t(), rows)
        if bias is not None and bias.requires_grad:
            own = columns.sum(0)
            bias.grad = own if bias.grad is None else bias.grad.add_(own)
        to_given = None
        if ctx.needs_input_grad[0]:
            matrix = weight.t() if ctx.transposed else weight
            to_given = (columns @ matrix).view(given.shape)
        return to_given, None, None, None, None


class _FrozenProduct(torch.autograd.Function):
    """`_Product` with a weight that is not trained: only the gradient with respect to the
    states is computed."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, products: Products
    ) -> Tensor:
        ctx.matrix = weight.t() if transposed else weight
        rows = given.reshape(-1, given.shape[-1])
        return _owned(products.forward(rows, ctx.matrix, bias), given.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        rows = upper.reshape(-1, upper.shape[-1]) @ ctx.matrix
        return rows.view(*upper.shape[:-1], ctx.matrix.shape[1]), None, None, None, None


class _Lookup(torch.autograd.Function):
    """Rows of an embedding."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return _owned(F.embedding(ids.reshape(-1), weight), ids.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        own = upper.reshape(-1, upper.shape[-1])
        if ctx.padding is not None:
            own = own * (ids.flatten() != ctx.padding).unsqueeze(1).to(own.dtype)
        sum_of(ctx.weight).index_add_(0, ids.flatten(), own)
        return None, None, None


def on_cpu(parameters: Iterable[Tensor]) -> bool:
    """Whether all parameters are on a CPU. What this module does has not been tried on GPUs."""
    return all(parameter.device.type == "cpu" for parameter in parameters)
