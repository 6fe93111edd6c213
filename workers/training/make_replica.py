"""Builds a rank's replica: where its parameters are, how its gradients are summed, and what steps it."""

import torch

from app.contract.assignment import Assignment
from workers.training.checkpoints.state import RunState
from workers.training.devices import memory
from workers.training.devices.stopwatch import Stopwatch
from workers.training.distributed.compression import Exact, In16Bits
from workers.training.distributed.group import Group, ProcessGroup
from workers.training.gradients.direct_sums import DirectSums, on_cpu
from workers.training.gradients.gradient_sums import Gradients, gradients_for
from workers.training.losses.load_balancing_loss import LoadBalancingLoss
from workers.training.losses.loss import TokenLoss
from workers.training.models.parameters import Parameters, parameters_by_layer
from workers.training.replica import Replica
from workers.training.window import Clipping, LossScale, Window

FIRST_FP16_SCALE = 65536.0


def place_parameters(
    assignment: Assignment, token_loss: TokenLoss, device: torch.device, group: Group
) -> Parameters:
    """Moves the model to its device, or this rank's part of it under fsdp. Returns what is trained."""
    if assignment.plan.strategy == "fsdp" and group.size > 1:
        from workers.training.distributed.sharding import mesh_of, shard

        assert isinstance(group, ProcessGroup)
        return shard(token_loss, group, mesh_of(group, device), assignment.plan.zero_stage)
    if assignment.spec.method.name != "qlora":
        token_loss.model.to(device)
    return Parameters(token_loss.model)


def make_replica(
    assignment: Assignment,
    device: torch.device,
    token_loss: TokenLoss,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    balance: LoadBalancingLoss | None,
    state: RunState,
    group: Group,
) -> Replica:
    """A rank's replica.

    Args:
        parameters: the model's, which are on the device already.
    """
    spec, precision = assignment.spec, assignment.plan.precision
    scale = _loss_scale(state) if precision == "fp16" else None
    layers = parameters_by_layer(token_loss.model) if spec.log_gradients else {}
    compression = In16Bits(group, spec.gradient_compression) if spec.gradient_compression else None
    direct = None
    if group.size == 1 and not spec.compile and on_cpu(parameters.trained.values()):
        direct = DirectSums(token_loss.model)
    token_loss.direct = direct
    window = Window(
        parameters.trained.values(),
        optimizer,
        Clipping(spec.gradient_clipping, spec.clip_mode),
        scale,
        gradients=_gradients(assignment, parameters, group, compression, direct),
        layers={layer: [parameters.of(each) for each in own] for layer, own in layers.items()},
        keep_micro_losses=spec.log_micro_losses,
        group=group,
        optimizer_device=torch.device("cpu") if spec.use_cpu_offload else None,
    )
    return Replica(
        device=device,
        precision=precision,
        model=token_loss.model,
        optimizer=optimizer,
        parameters=parameters,
        window=window,
        token_loss=token_loss,
        balance=balance,
        loss_scale=scale,
        compression=compression if group.size > 1 else None,
        memory=memory.MemoryWatch(device, assignment.plan.ranks[group.rank].memory_limit_bytes),
        stopwatch=Stopwatch(device),
        recomputes_activations=spec.gradient_checkpointing or state.fallbacks.checkpointing,
    )


def _gradients(
    assignment: Assignment,
    parameters: Parameters,
    group: Group,
    compression: In16Bits | None,
    direct: DirectSums | None,
) -> Gradients:
    spec = assignment.spec
    if parameters.is_sharded:
        from workers.training.distributed.sharding import ShardedParameters, ShardedSums

        assert isinstance(parameters, ShardedParameters)
        return ShardedSums(parameters)
    return gradients_for(
        list(parameters.trained.values()),
        in_fp32=spec.accumulate_in_fp32,
        host=torch.device("cpu") if spec.accumulate_gradients_on_cpu else None,
        exchange=None if group.size == 1 else compression or Exact(group),
        direct=direct,
    )


def _loss_scale(state: RunState) -> LossScale:
    saved = state.loss_scale
    return LossScale(saved.value or FIRST_FP16_SCALE, good_windows=saved.good_windows)
