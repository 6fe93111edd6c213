"""Optimizers, and which parameters decay."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from app.schemas.spec import OptimizerSpec
from workers.training.faults import CannotTrain


def make_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a spec over the trainable parameters; matrices decay, norms and biases don't.

    Raises:
        CannotTrain: its package is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = spec.learning_rate
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, **_own(spec, "betas", "eps"), fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, **_own(spec, "momentum", "nesterov"), fused=True)
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


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _own(spec: OptimizerSpec, *names: str) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}


def _from(
    module: str, name: str, groups: list[dict[str, Any]], rate: float, own: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of a package that is imported only here."""
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
