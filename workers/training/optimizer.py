"""Optimizers, and which parameters decay."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from app.schemas.spec import OptimizerSpec


def make_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a spec over the trainable parameters; matrices decay, norms and biases don't."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=True
            )
        case "sgd":
            return torch.optim.SGD(groups, lr=spec.learning_rate, momentum=spec.momentum, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
