"""RMS norms and rotary embeddings of models in fp32 on a CPU, with backward passes of their own.

The models of transformers write both as several operators. Autograd derives a backward pass from each
operator, which reads and writes the states many times. For a slice of each head, for example, it makes a
gradient as large as the head that is zero outside of the slice. Here, the derivative of the whole is written
out, which needs fewer operators. liger-kernel does the same in a single kernel each, on GPUs.

Before the first step, the gradient is compared with that of the model's own layers.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.contract.spec import Spec
from workers.reporter import Reporter
from workers.training.checkpoints.state import Fallbacks
from workers.training.data.batch_loader import Loader
from workers.training.distributed.group import Group
from workers.training.kernels.selection import ROTARY, Patch, base_of, may_replace_kernels, use_if_it_agrees
from workers.training.replica import Replica

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6
"""How close the results in fp32 of two ways to compute a layer are."""


def choose_lean_layers(
    replica: Replica,
    loader: Loader,
    spec: Spec,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
    *,
    at_start: bool,
) -> None:
    """Replaces norms and rotary embeddings of a model in fp32 on a CPU, if that leaves the gradient as it is.

    All ranks do the same. A resumed run replaces them if, and only if, earlier attempts did, so
    that it stays the same to the bit.

    Args:
        at_start: whether no micro-batch of the run was trained before.
    """
    if replica.device.type != "cpu" or replica.precision != "fp32" or not may_replace_kernels(replica, spec):
        return
    if not at_start and not fallbacks.has_lean_layers:
        return
    model = base_of(replica.model)
    norms, rotary = suitable_norms(model), suitable_rotary(model)
    named = " and ".join([*(["norms"] if norms else ()), *(["rotary embeddings"] if rotary else ())])
    if not named:
        return
    name = f"a backward pass written for {named}"
    kernels = Patch(name, model, lambda: use(norms, rotary), needs_package=False)
    if at_start:
        use_if_it_agrees(kernels, replica, loader, reporter)
        (is_declined,) = group.any(kernels not in replica.kernels)
        if is_declined:
            kernels.switch_off()
            replica.kernels = tuple(each for each in replica.kernels if each is not kernels)
        fallbacks.has_lean_layers = not is_declined
    else:
        kernels.switch_on()
        replica.kernels = (*replica.kernels, kernels)


def suitable_norms(model: nn.Module) -> dict[nn.Module, float]:
    """The layers of a model that are plain RMS norms with a weight, and what each adds to the mean square."""
    found = {
        layer: _epsilon_of(layer) for layer in model.modules() if type(layer).__name__.endswith("RMSNorm")
    }
    return {layer: epsilon for layer, epsilon in found.items() if epsilon is not None}


def suitable_rotary(model: nn.Module) -> list[dict[str, Any]]:
    """The namespaces of those Python modules that define a model's layers and whose function for rotary
    embeddings turns the first half of each head into the second."""
    modules = {type(layer).__module__ for layer in model.modules()}
    spaces = [vars(sys.modules[name]) for name in sorted(modules)]
    return [space for space in spaces if ROTARY in space and _turns_halves(space[ROTARY])]


def use(norms: dict[nn.Module, float], rotary: list[dict[str, Any]]) -> None:
    """Replaces the forward passes of norms, and the functions for rotary embeddings."""
    for layer, epsilon in norms.items():
        layer.forward = partial(_normalised, layer, type(layer).forward, epsilon)
    for space in rotary:
        space[ROTARY] = partial(_rotated, space[ROTARY])


def _epsilon_of(layer: nn.Module) -> float | None:
    """What a norm adds to the mean square; None if the layer computes something else than `_Norm`."""
    weight: Any = getattr(layer, "weight", None)
    epsilon = next((getattr(layer, name) for name in _EPSILONS if hasattr(layer, name)), None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if weight.dtype != torch.float32 or "forward" in vars(layer) or len(list(layer.parameters())) != 1:
        return None
    states = torch.linspace(-1.0, 2.0, 3 * len(weight)).view(3, -1)
    with torch.no_grad():
        try:
            own = layer(states)
        except (RuntimeError, TypeError, ValueError):  # it needs more than the states
            return None
        return epsilon if _are_close(own, _norm(states, weight, epsilon)) else None


def _turns_halves(function: Callable[..., Any]) -> bool:
    """Whether a function for rotary embeddings computes what `_Rotation` does."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cosines, sines = (torch.randn(2, 3, 8, generator=generator) for _ in range(2))
    try:
        own = function(query, key, cosines, sines)
    except Exception:  # it has other arguments
        return False
    wanted = [_rotation(states, cosines.unsqueeze(1), sines.unsqueeze(1)) for states in (query, key)]
    return len(own) == 2 and all(map(_are_close, own, wanted))


def _are_close(own: Any, wanted: Tensor) -> bool:
    is_alike = isinstance(own, Tensor) and own.shape == wanted.shape and own.dtype == wanted.dtype
    return is_alike and torch.allclose(own, wanted, _RELATIVE, _ABSOLUTE)


def _normalised(
    layer: nn.Module, own: Callable[..., Tensor], epsilon: float, hidden_states: Tensor
) -> Tensor:
    weight: Any = layer.weight
    if not _is_plain(hidden_states) or weight.dtype != torch.float32:
        return own(layer, hidden_states)
    return _norm(hidden_states, weight, epsilon)


def _rotated(
    own: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary embeddings; the arguments have the names of transformers' functions."""
    whole = q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
    if not (whole and all(map(_is_plain, (q, k, cos, sin)))) or cos.requires_grad or sin.requires_grad:
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotation(q, cos, sin), _rotation(k, cos, sin)


def _is_plain(states: Tensor) -> bool:
    is_traced = torch.compiler.is_compiling()  # a compiler fuses the model's own operators itself
    return states.dtype == torch.float32 and states.device.type == "cpu" and not is_traced


def _norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    found: Tensor = _Norm.apply(states, weight, epsilon)  # type: ignore[no-untyped-call]
    return found


def _rotation(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    found: Tensor = _Rotation.apply(states, cosines, sines)  # type: ignore[no-untyped-call]
    return found


class _Norm(torch.autograd.Function):
    """y = w · n with n = x / √(mean(x²) + ε), over the last dimension (Zhang and Sennrich 2019,
    arXiv:1910.07467, equation 4).

    With the gradient g of y: the gradient of w is Σ g · n over all positions, and that of x is
    (g · w - n · mean(g · w · n)) / √(mean(x²) + ε).
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        width = states.shape[-1]
        norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = norms.square_().div_(width).add_(epsilon).rsqrt_()
        normalised: Tensor = states * scale
        ctx.save_for_backward(normalised, scale, weight)
        return normalised * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> Any:
        normalised, scale, weight = ctx.saved_tensors
        products = upper * normalised
        to_weight = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        to_states = None
        if ctx.needs_input_grad[0]:
            mean = (products @ weight).div_(len(weight)).unsqueeze(-1)
            to_states = (upper * weight).addcmul_(normalised, mean, value=-1).mul_(scale)
        return to_states, to_weight, None


class _Rotation(torch.autograd.Function):
    """With the halves a and b of each head: (a, b) · cos + (-b, a) · sin (Su et al. 2021, arXiv:2104.09864,
    equation 34, in transformers' order of dimensions)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        half = states.shape[-1] // 2
        turned = states * cosines
        turned[..., :half].addcmul_(states[..., half:], sines[..., :half], value=-1)
        turned[..., half:].addcmul_(states[..., :half], sines[..., half:])
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upper: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        half = upper.shape[-1] // 2
        found = upper * cosines
        found[..., :half].addcmul_(upper[..., half:], sines[..., half:])
        found[..., half:].addcmul_(upper[..., :half], sines[..., :half], value=-1)
        return found, None, None
