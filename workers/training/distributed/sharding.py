"""A model whose parameters are divided among ranks (FSDP2), so that none holds all of them.

Each rank keeps a part of each parameter, its gradient and its optimizer states. How much is exchanged, and
what a rank holds between the micro-batches of a window, depends on the ZeRO stage:

1  A layer's parts are gathered once per window, and its whole gradients are kept. They are summed over all
   ranks, and divided again, in the window's last backward pass. Only the optimizer's states stay divided.
2  As 1, but gradients are summed and divided after each backward pass.
3  As 2, and a layer's parts are gathered for each forward and for each backward pass.

In contrast to FSDP's default, gradients are summed, not averaged. Where each pass exchanges gradients, all
ranks run equally many passes, at the same time; in stage 1, each rank runs at least one.

The optimizer trains plain tensors that share their memory with FSDP's parts, so it must treat each element by
itself (`ELEMENTWISE`): one that computes norms of whole parameters would see only a part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from app.contract.spec import ZeroStage
from workers.training.distributed.group import Group, ProcessGroup
from workers.training.losses.loss import TokenLoss
from workers.training.models.parameters import Parameters


def mesh_of(group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """The ranks among which parameters are divided, and the kind of their devices."""
    return DeviceMesh.from_group(group.gradients, device.type)


def shard(token_loss: TokenLoss, group: Group, mesh: DeviceMesh, stage: ZeroStage = 3) -> "ShardedParameters":
    """Divides the parameters of a model, and moves this rank's parts to its device.

    Args:
        token_loss: the module whose forward pass trains.
    """
    after_forward = None if stage == 3 else False
    for layer in sharded_modules_of(token_loss):
        fully_shard(layer, mesh=mesh, reshard_after_forward=after_forward)
    fully_shard(token_loss, mesh=mesh, reshard_after_forward=after_forward)
    modules = [module for module in token_loss.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return ShardedParameters(token_loss.model, group, mesh, modules, stage)


def sharded_modules_of(module: nn.Module) -> list[nn.Module]:
    """The layers that are divided one by one: the elements of the outermost lists of modules."""
    lists = [
        found
        for found in module.modules()
        if isinstance(found, nn.ModuleList) and len(found) > 1 and any(each.parameters() for each in found)
    ]
    outer: list[nn.ModuleList] = []
    within: set[nn.Module] = set()
    for found in lists:  # `modules()` yields parents before their children
        if found not in within:
            outer.append(found)
            within.update(inner for inner in found.modules() if inner is not found)
    return [layer for found in outer for layer in found if any(True for _ in layer.parameters())]


class ShardedParameters(Parameters):
    """Trainable parameters of which each rank has a part.

    Args:
        modules: those whose parameters are gathered together.
    """

    is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        mesh: DeviceMesh,
        modules: Sequence[FSDPModule],
        stage: ZeroStage,
    ) -> None:
        self._group, self._mesh, self._model = group, mesh, model
        self._modules, self.stage = modules, stage
        self.exchanges_in_each_pass = stage > 1
        self._divided: dict[str, Any] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.trained = {
            name: nn.Parameter(parameter.to_local().detach()) for name, parameter in self._divided.items()
        }
        self.names = {own: name for name, own in self.trained.items()}
        self._own = {divided: self.trained[name] for name, divided in self._divided.items()}

    def of(self, parameter: Tensor) -> nn.Parameter:
        return self._own[parameter]

    def divided(self, name: str) -> Any:
        """FSDP's parameter of this name, a DTensor."""
        return self._divided[name]

    def prepare_pass(self, *, is_last: bool) -> None:
        """Call this before a backward pass. After the window's last one, nothing stays whole."""
        for module in self._modules:
            module.set_requires_gradient_sync(is_last or self.stage > 1, recurse=False)
            module.set_reshard_after_backward(is_last or self.stage == 3, recurse=False)

    def keep_parts_only(self) -> None:
        """Discards what is whole: weights, and gradients that were not exchanged."""
        if self.stage == 3:
            return
        for parameter in self._model.parameters():
            parameter.grad = None
        for module in self._modules:
            module.reshard()

    def whole(self, name: str, own: Tensor) -> Tensor:
        parameter = self._divided[name]
        if own.shape != parameter.to_local().shape:
            return own.detach()  # a number of the optimizer's, such as that of its steps
        together = DTensor.from_local(
            own.detach(), self._mesh, [Shard(0)], run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        with self._group.waiting():
            whole: Tensor = together.full_tensor()
        return whole.cpu() if self._group.leads else torch.empty(0)

    def part(self, name: str, whole: Tensor) -> Tensor:
        if whole.shape != self._divided[name].shape:
            return whole
        rows = -(-len(whole) // self._group.size)
        return whole[self._group.rank * rows : (self._group.rank + 1) * rows]


class ShardedSums:
    """Sums gradients in FSDP's own parameters; FSDP sums them over all ranks no later than in the last
    backward pass."""

    is_sharded = True

    def __init__(self, parameters: ShardedParameters) -> None:
        self._parameters = parameters
        self._pairs = [(parameters.divided(name), own) for name, own in parameters.trained.items()]

    def open(self, loss_factor: float) -> None:
        self._parameters.prepare_pass(is_last=False)

    def begin_last(self) -> None:
        self._parameters.prepare_pass(is_last=True)

    def wait_until_added(self) -> None:
        """Every gradient is added during its backward pass."""

    def sums(self) -> dict[Tensor, Tensor]:
        return {own: divided.grad.to_local() for divided, own in self._pairs if divided.grad is not None}

    def present(self) -> list[bool]:
        return [divided.grad is not None for divided, _ in self._pairs]

    def exchange(self, present: Sequence[bool], *, discard: bool) -> None:
        """They are exchanged already."""

    def assign_to_parameters(self) -> None:
        for divided, own in self._pairs:
            own.grad = None if divided.grad is None else divided.grad.to_local()

    def clear(self) -> None:
        self._parameters.keep_parts_only()
        for divided, own in self._pairs:
            divided.grad = own.grad = None

    def release(self) -> None:
        self.clear()
