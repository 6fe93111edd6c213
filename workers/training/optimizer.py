"""Builds optimizers, and selects the parameters that get weight decay."""

from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from app.contract.spec import OptimizerSpec
from workers.training.exceptions import CannotTrain
from workers.training.models.parameters import Parameters


def make_optimizer(
    spec: OptimizerSpec,
    parameters: Iterable[nn.Parameter],
    host: torch.device | None = None,
    undecayed: Collection[Tensor] = (),
) -> torch.optim.Optimizer:
    """The optimizer of a spec over the trainable parameters; only matrices have weight decay.

    Args:
        host: the device of its states and arithmetic; None for that of the parameters.
        undecayed: matrices without weight decay (`biases_and_gains`).

    Raises:
        CannotTrain: its package is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decays = [parameter.ndim >= 2 and parameter not in undecayed for parameter in trained]
    return OnHost(spec, trained, decays, host) if host is not None else _make(spec, trained, decays)


def biases_and_gains(model: nn.Module) -> set[str]:
    """The names of biases, and of all parameters of norms. In some families they have two dimensions: the
    biases of gpt-oss's experts, and the gains of Cohere's norms of queries and keys."""
    return {
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if name == "bias" or name.endswith("_bias") or "norm" in type(module).__name__.lower()
    }


class OnHost(torch.optim.Optimizer):
    """An optimizer over copies of the parameters on another device, which also holds its states.

    A step moves the gradients there and the new weights back, and takes no memory on the parameters' device.
    The arithmetic is that of the optimizer itself, in the same precision.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        trained: Sequence[nn.Parameter],
        decays: Sequence[bool],
        host: torch.device,
    ) -> None:
        self._pairs = [(p, nn.Parameter(p.detach().to(host, copy=True))) for p in trained]
        self._own = _make(spec, [copy for _, copy in self._pairs], decays)
        self._share_state()

    def _share_state(self) -> None:
        self.param_groups, self.state, self.defaults = (
            self._own.param_groups, self._own.state, self._own.defaults,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is known by now"
        for parameter, copy in self._pairs:
            if parameter.grad is not None:
                copy.grad, parameter.grad = parameter.grad.to(copy.device), None
        self._own.step()
        for parameter, copy in self._pairs:
            if copy.grad is not None:
                parameter.copy_(copy)
                copy.grad = None

    def copied_from(self) -> dict[Tensor, Tensor]:
        """Maps each copy to its original parameter."""
        return {copy: parameter for parameter, copy in self._pairs}

    def state_dict(self) -> dict[str, Any]:
        return self._own.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also copies the model's weights, which must have been loaded before."""
        self._own.load_state_dict(state_dict)
        self._share_state()
        with torch.no_grad():
            for parameter, copy in self._pairs:
                copy.copy_(parameter)


def _sgd_can_be_fused(trained: Sequence[nn.Parameter], momentum: float) -> bool:
    """On a CPU, fused SGD leaves nearly all 16-bit weights unchanged. With momentum, it fails if a parameter
    gets its first gradient after others have theirs, as with LayerDrop (both found with torch 2.13)."""
    in_16_bits = (p.device.type == "cpu" and p.dtype.itemsize < torch.float32.itemsize for p in trained)
    return not momentum and not any(in_16_bits)


def _make(
    spec: OptimizerSpec, trained: Sequence[nn.Parameter], decays: Sequence[bool]
) -> torch.optim.Optimizer:
    """The optimizer.

    Args:
        decays: whether each of the parameters has weight decay.
    """
    groups: list[dict[str, Any]] = [
        {"params": list(compress(trained, decays)), "weight_decay": spec.weight_decay},
        {"params": [p for p, own in zip(trained, decays, strict=True) if not own], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = spec.learning_rate
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, **_own(spec, "betas", "eps"), fused=True)
        case "sgd":
            options = _own(spec, "momentum", "nesterov")
            fused = _sgd_can_be_fused(trained, options["momentum"])
            return torch.optim.SGD(groups, lr=rate, **options, fused=fused)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate)
        case "adamw_8bit":
            return _from("bitsandbytes.optim", "AdamW8bit", groups, rate, _own(spec, "betas", "eps"))
        case "lion":
            return _from("pytorch_optimizer", "Lion", groups, rate, _own(spec, "betas"))
        case "lamb":
            return _from("pytorch_optimizer", "Lamb", groups, rate, _own(spec, "betas", "eps"))
        case "lars":
            own = _own(spec, "momentum", "nesterov", "trust_coefficient")
            return _from("pytorch_optimizer", "LARS", groups, rate, own)


def parameter_names(parameters: Parameters, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its `state_dict()` counts them."""
    original = optimizer.copied_from() if isinstance(optimizer, OnHost) else {}
    return [
        parameters.names[original.get(own, own)]
        for group in optimizer.param_groups
        for own in group["params"]
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _own(spec: OptimizerSpec, *names: str) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}


def _from(
    module: str, name: str, groups: list[dict[str, Any]], rate: float, own: dict[str, Any]
) -> torch.optim.Optimizer:
    """Makes an optimizer of a package that is imported only when it is needed."""
    package = module.split(".")[0]
    try:
        make = getattr(import_module(module), name)
    except ImportError as error:
        raise CannotTrain(
            "not_installed",
            f"the optimizer {name} needs the package {package}, which could not be imported ({error}): "
            f"pip install {package.replace('_', '-')}, or choose adamw",
        ) from error
    optimizer: torch.optim.Optimizer = make(groups, lr=rate, **own)
    return optimizer
