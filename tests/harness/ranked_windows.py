"""Windows that several ranks accumulate together (tests/harness/ranks.py): what each of them sees."""

import warnings
from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from app.contract.model_reference import LoraSpec
from app.contract.plan import MicroBatchRule, TokenBudget
from app.contract.spec import GradientCompression, ZeroStage
from tests.harness.small_models import make_model, make_window64
from workers.training.distributed.compression import Exact, In16Bits
from workers.training.distributed.group import Group, ProcessGroup
from workers.training.distributed.partition import partition
from workers.training.distributed.sharding import ShardedParameters, ShardedSums, mesh_of, shard
from workers.training.gradients.gradient_sums import gradients_for
from workers.training.losses.load_balancing_loss import LoadBalancingLoss, load_balancing_loss_of
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import Groups, cut_window
from workers.training.models.adapters import with_adapters
from workers.training.models.parameters import Parameters
from workers.training.recovery.decision import Verdict, WindowOutcome, decide
from workers.training.window import Clipping, LossScale, Window

_BY_TOKENS = TokenBudget(tokens=300)

Trouble = Literal["none", "out_of_memory", "stop", "nan"]


@dataclass(frozen=True)
class RankedWindow:
    """A window, and how the ranks divide it."""

    family: str
    dtype: torch.dtype = torch.float64
    samples: int = 64
    lora: bool = False
    smoothing: float = 0.0
    weighted: bool = False
    autocast: bool = False
    on_cpu: bool = False
    zero_stage: ZeroStage | None = None
    """None: each rank has a copy of the model."""
    compression: GradientCompression | None = None
    rule: MicroBatchRule = _BY_TOKENS
    shares: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Seen:
    """What a rank knows of a window at its end."""

    gradient: np.ndarray
    """Over all ranks."""
    weights: np.ndarray
    """After the step, if it was made."""
    verdict: Verdict
    loss: float
    grad_norm: float
    micro_losses: tuple[float, ...]
    own_micro_batches: int
    exchanges: int
    """How often this rank exchanged gradients."""
    out_of_memory_on: tuple[int, ...]


class Counted(Group):
    """A group that counts the exchanges of gradients."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.sum, self.any, self.broadcast = group.sum, group.any, group.broadcast  # type: ignore[method-assign]
        self.begin_all_to_all, self.begin_all_gather = group.begin_all_to_all, group.begin_all_gather  # type: ignore[method-assign]
        self._begin = group.begin_all_reduce
        self.exchanges = 0

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        self.exchanges += 1
        return self._begin(tensor)


def accumulate(
    group: Group, given: RankedWindow, troubles: dict[int, Trouble], scale: float | None = None
) -> list[Seen]:
    """Accumulates a window twice on every rank: first with trouble on some of them, then without.

    Args:
        troubles: by rank, what goes wrong in its part of the first window.
        scale: the loss scale, as for fp16. It is a power of two, so that it changes no gradient.
    """
    counted = Counted(group)
    model = _model(given)
    balance = load_balancing_loss_of(model, "window")
    token_loss = TokenLoss(model, smoothing=given.smoothing, routed=balance is not None)
    own: Parameters = Parameters(model)
    if given.zero_stage and isinstance(group, ProcessGroup):
        own = shard(token_loss, group, mesh_of(group, torch.device("cpu")), given.zero_stage)
    parameters = list(own.trained.values())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    host = torch.device("cpu") if given.on_cpu else None
    exact = Exact(counted) if group.size > 1 else None
    exchange = In16Bits(counted, given.compression) if given.compression and exact else exact
    sums = gradients_for(parameters, in_fp32=True, host=host, exchange=exchange)
    window = Window(
        parameters,
        optimizer,
        Clipping(1.0),
        None if scale is None else LossScale(scale),
        gradients=ShardedSums(own) if isinstance(own, ShardedParameters) else sums,
        keep_micro_losses=True,
        group=counted,
    )
    return [
        _seen(counted, given, trouble, own, window, token_loss, balance)
        for trouble in (troubles.get(group.rank, "none"), "none")
    ]


def _seen(
    group: Counted,
    given: RankedWindow,
    trouble: Trouble,
    parameters: Parameters,
    window: Window,
    token_loss: TokenLoss,
    balance: LoadBalancingLoss | None,
) -> Seen:
    data = make_window64()
    lengths = np.asarray(data.lengths[: given.samples])
    taken = partition(lengths, given.shares[: group.size])
    groups: list[Groups] = [
        [[part[i] for i in own] for own in cut_window(lengths[part], given.rule)] for part in taken
    ]
    batches = [
        data.batch(own, weighted=given.weighted, packed=False, routed=balance is not None)
        for own in groups[group.rank]
    ]
    chosen = list(range(given.samples))
    whole = data.batch(chosen, weighted=given.weighted, packed=False, routed=False)
    denominator = float(whole.weights.double().sum()) if whole.weights is not None else len(whole.targets)
    group.exchanges = 0
    filler = data.batch([int(np.argmin(lengths))], weighted=False, packed=False, routed=balance is not None)
    passes = len(batches)
    if parameters.is_sharded:
        passes = max(map(len, groups)) if parameters.exchanges_in_each_pass else max(1, passes)
    missing = passes - len(batches)
    if balance is not None:
        balance.begin(given.samples)
        for batch in batches:
            balance.observe(token_loss.router_logits(batch), batch)
        for _ in range(missing):
            token_loss.router_logits(filler)
        balance.sum_over(group, torch.device("cpu"))
    counts = [len(own) for own in groups]
    window.open(denominator, len(batches), passes=passes, by_rank=counts, exchange_early=True)
    fails_at = len(batches) // 2
    for number, batch in enumerate(batches):
        if trouble in ("out_of_memory", "stop") and number == fails_at:
            window.abandon()
            break
        with torch.autocast("cpu", torch.bfloat16, enabled=given.autocast):
            forward = token_loss(batch)
            share = balance.share(forward.router_logits, batch) if balance else None
        loss = forward.loss_sum * (nan if trouble == "nan" and number == fails_at else 1.0)
        window.add(loss, share)
    for _ in range(missing):
        with torch.autocast("cpu", torch.bfloat16, enabled=given.autocast):
            forward = token_loss(filler)
        window.add_nothing(sum((logits.sum() for logits in forward.router_logits), forward.loss_sum) * 0.0)
    outcome = window.exchange(
        out_of_memory=trouble == "out_of_memory", interruption_requested=trouble == "stop"
    )
    gradient = np.zeros(0) if outcome else _flat(parameters, window.gradient())
    outcome = outcome or WindowOutcome(window.totals())
    verdict = decide(outcome)
    loss, norm, micro_losses = nan, nan, ()
    if outcome.totals is not None:
        closed = window.finish(outcome.totals, verdict)
        loss, norm, micro_losses = closed.loss, closed.grad_norm, closed.micro_losses
    weights = _flat(parameters, {own: own.detach() for own in parameters.trained.values()})
    return Seen(
        gradient, weights, verdict, loss, norm, micro_losses, len(batches), group.exchanges,
        outcome.out_of_memory_on,
    )  # fmt: skip


def _flat(parameters: Parameters, tensors: dict[Tensor, Tensor]) -> np.ndarray:
    """Tensors by parameter as one; those of a divided model only on rank 0."""
    parts = [
        parameters.whole(name, tensors.get(own, torch.zeros_like(own))).double().flatten()
        for name, own in parameters.trained.items()
    ]
    return torch.cat(parts).numpy().copy()


def _model(given: RankedWindow) -> Any:
    model = make_model(given.family, given.dtype)
    if given.lora:
        with warnings.catch_warnings(action="ignore"):  # peft on what is no linear layer
            spec = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
            model = with_adapters(model, spec, seed=1).to(given.dtype)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # B begins at zero, where A would have no gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    random = torch.randn(parameter.shape, generator=generator, dtype=given.dtype)
                    parameter.copy_(random * 0.1)
    return model.train()
