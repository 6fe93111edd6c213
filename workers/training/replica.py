"""A replica: one copy of the model on one device, with what accumulates its gradients and steps it."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.profiler import record_function

from app.contract.spec import RunPrecision
from workers.training.devices import memory
from workers.training.devices.stopwatch import Stopwatch
from workers.training.distributed.compression import In16Bits
from workers.training.losses.load_balancing_loss import LoadBalancingLoss
from workers.training.losses.loss import Forward, TokenLoss
from workers.training.micro_batches.batches import MicroBatch
from workers.training.models.parameters import Parameters
from workers.training.models.precision import autocast
from workers.training.window import LossScale, Window

if TYPE_CHECKING:
    from workers.training.kernels.selection import Kernels


@dataclass
class Replica:
    """What one device trains with."""

    device: torch.device
    precision: RunPrecision
    model: Any
    optimizer: torch.optim.Optimizer
    parameters: Parameters
    window: Window
    token_loss: TokenLoss
    balance: LoadBalancingLoss | None
    """None if the model has no experts, or if their load is not to be balanced."""
    loss_scale: LossScale | None
    """None unless the precision is fp16."""
    compression: In16Bits | None
    """None if ranks send gradients in their own precision."""
    memory: memory.MemoryWatch
    stopwatch: Stopwatch
    kernels: "tuple[Kernels, ...]" = ()
    """Those that are in use instead of the model's own."""
    recomputes_activations: bool = False
    """Whether the backward pass computes each layer again (gradient checkpointing)."""

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks hold parts of the model, so that all of them run each pass at the same time."""
        return self.parameters.is_sharded

    def autocast(self, *, keeps_copies: bool = False) -> Any:
        """The context of a forward pass in the plan's precision.

        Args:
            keeps_copies: whether converted weights are kept even with gradient checkpointing, because the
                context spans many passes with the same weights.
        """
        keeps_copies = keeps_copies or not self.recomputes_activations
        return autocast(self.precision, self.device.type, keeps_copies=keeps_copies)

    def forward(self, batch: MicroBatch) -> Forward:
        """The summed loss of a micro-batch, in the plan's precision."""
        with self.autocast():
            found: Forward = self.token_loss(batch)
            return found

    def evaluate(self, batch: MicroBatch) -> Forward:
        """The summed loss of a micro-batch without label smoothing, and how many targets are predicted."""
        with self.autocast():
            found: Forward = self.token_loss(batch, evaluates=True)
            return found

    def scores(self, batch: MicroBatch) -> torch.Tensor:
        """The log-probability of each part of a micro-batch's `scoring`, without gradient: fp64 of shape
        (parts,)."""
        with self.autocast():
            found: Forward = self.token_loss(batch, only_score=True)
            return found.loss_sum

    def divergence(self, batch: MicroBatch) -> torch.Tensor:
        """The weighted sum of log-ratios to the reference, and the sum of the weights: fp64 of shape (2,)."""
        assert batch.scoring is not None
        weights = batch.scoring.weights
        ratios = self.scores(batch)[: batch.scoring.sequences] - batch.scoring.reference
        return torch.stack([(weights * ratios).sum(), weights.sum()])

    def add(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch into the open window."""
        add(self, batch)

    def observe_routing(self, batch: MicroBatch) -> None:
        """Counts what the routers choose, for a balance over the whole window; without gradient."""
        assert self.balance is not None
        with self.autocast():
            self.balance.observe(self.token_loss.router_logits(batch), batch)

    def add_nothing(self, batch: MicroBatch) -> None:
        """Takes part in the forward and backward pass of other ranks, without any gradient of its own."""
        forward = self.forward(batch)
        nothing = forward.loss_sum * 0.0
        if self.balance is not None:
            nothing = nothing + sum(logits.sum() for logits in forward.router_logits) * 0.0
        self.window.add_nothing(nothing)

    def route_nothing(self, batch: MicroBatch) -> None:
        """Takes part in the routing of other ranks."""
        with self.autocast():
            self.token_loss.router_logits(batch)

    def free_memory(self) -> None:
        """Discards the current window, and releases cached memory of the allocator."""
        self.window.abandon()
        gc.collect()  # activations may be part of a cycle, such as that of an error and its frames
        if self.device.type == "cuda":
            memory.begin_steps(self.device)


class Accumulating(Protocol):
    """What `add` needs; a simulated step implements it, too."""

    window: Window
    balance: LoadBalancingLoss | None

    def forward(self, batch: MicroBatch) -> Forward: ...


def add(step: Accumulating, batch: MicroBatch) -> None:
    """Forward and backward of one micro-batch into the open window."""
    with record_function("accrue.forward"):
        forward, balance = step.forward(batch), step.balance
        extra_loss = balance.share(forward.router_logits, batch) if balance else None
    with record_function("accrue.backward"):
        step.window.add(forward.loss_sum, extra_loss, forward.measured)
