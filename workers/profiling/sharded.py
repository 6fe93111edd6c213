"""A model that is divided among ranks (fsdp), seen by rank 0: the others do not exist.

Collectives of the process group return at once, without data, which fake tensors do not have anyway.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.contract.spec import ZeroStage
from workers.training.distributed.group import Group
from workers.training.distributed.sharding import ShardedParameters, ShardedSums, shard
from workers.training.losses.loss import TokenLoss


class _First(Group):
    """Rank 0 of several."""

    def __init__(self, size: int) -> None:
        self.size = size


class Sharded:
    """A divided model's parameters, of which rank 0 has the largest parts.

    Args:
        token_loss: the module whose forward pass trains.
        parts: the number of ranks.
        stage: what they divide.
    """

    tensor_type = DTensor

    def __init__(self, token_loss: TokenLoss, parts: int, stage: ZeroStage) -> None:
        self.parameters: ShardedParameters = shard(token_loss, _First(parts), _mesh(parts), stage)

    def sums(self) -> ShardedSums:
        """Where gradients are summed."""
        return ShardedSums(self.parameters)

    @staticmethod
    def own_part(tensor: Tensor) -> Tensor:
        """The part of a parameter that this rank has; a buffer is whole."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(ranks: int) -> DeviceMesh:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    assert dist.group.WORLD is not None
    with torch.device("cpu"):
        return DeviceMesh.from_group(dist.group.WORLD, "cpu")
