"""A mixture of experts' load-balancing loss, exact however the window is split.

The loss of Switch Transformers (Fedus et al. 2021, equations 4 to 6), as transformers implements it: with E
experts, F_e the share of (token, layer) rows that chose expert e among their top k, and P_e the mean
routing probability, it is coefficient × E × Σ F_e × P_e. A product of means is not a sum over tokens: the
mean of the micro-batches' losses is a different loss, and their sum over K micro-batches is about K
times too large.

- `window`: F is counted over the whole window by a first forward without gradient. F has no gradient
  (it comes from an argmax), and P is a mean over rows, so that with F known the loss is a sum over rows.
- `sequence`: the same product within each sequence, averaged over the window's sequences (as in
  DeepSeek-V3, 2024, equations 17 to 20). This is a sum over sequences and costs nothing, but is a different
  loss.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from workers.training.distributed.group import Group
from workers.training.exceptions import CannotTrain
from workers.training.micro_batches.batches import MicroBatch

_MOST_COEFFICIENT = 100.0


@dataclass
class LoadBalancingLoss:
    """Computes the load-balancing loss, one window after another."""

    coefficient: float
    experts: int
    top_k: int
    scope: Literal["window", "sequence"]
    _chosen: Tensor | None = field(default=None, repr=False)
    _rows: int = 0
    _sequences: int = 0

    def begin(self, sequences: int) -> None:
        """Starts a window of `sequences` sequences."""
        self._chosen, self._rows, self._sequences = None, 0, sequences

    def observe(self, router_logits: tuple[Tensor, ...], batch: MicroBatch) -> None:
        """Counts the routers' choices for a micro-batch. Only the scope `window` needs this."""
        if self._chosen is None:
            first = router_logits[0]
            self._chosen = torch.zeros(self.experts, dtype=_at_least_fp32(first), device=first.device)
        for logits in router_logits:
            probabilities = self._probabilities(logits, batch)
            self._chosen += self._choices(probabilities).sum(0)
            self._rows += len(probabilities)

    def sum_over(self, group: Group, device: torch.device) -> None:
        """Replaces the counts by their sums over all ranks, of which each has observed its own part of the
        window."""
        if group.size == 1:
            return
        empty = torch.zeros(self.experts, dtype=torch.float32)
        chosen = empty if self._chosen is None else self._chosen
        rows, *counts = group.sum([float(self._rows), *chosen.tolist()])
        self._rows = round(rows)
        self._chosen = torch.tensor(counts, dtype=torch.float64).to(device, chosen.dtype)

    def share(self, router_logits: tuple[Tensor, ...], batch: MicroBatch) -> Tensor:
        """This micro-batch's share of the window's loss: shares add up to the whole. A scalar."""
        if self.scope == "sequence":
            return self._by_sequence(router_logits, batch)
        assert self._chosen is not None, "share() before observe()"
        fractions = self._chosen / self._rows
        sums = torch.stack([self._probabilities(logits, batch).sum(0) for logits in router_logits]).sum(0)
        return self.coefficient * self.experts * (fractions * sums).sum() / self._rows

    def chosen(self) -> Tensor:
        """How often each expert was chosen in the window; shape (experts,)."""
        assert self._chosen is not None, "chosen() before observe()"
        return self._chosen

    def _by_sequence(self, router_logits: tuple[Tensor, ...], batch: MicroBatch) -> Tensor:
        assert batch.sample_of_token is not None, (
            "a mixture of experts needs to know which sample each token belongs to"
        )
        like: dict[str, Any] = {"dtype": _at_least_fp32(router_logits[0]), "device": router_logits[0].device}
        zeros = torch.zeros(len(batch.lengths), self.experts, **like)
        ones = torch.ones(len(batch.sample_of_token), **like)
        chosen, sums, rows = zeros, zeros, zeros[:, 0]
        for logits in router_logits:
            probabilities = self._probabilities(logits, batch)
            chosen = chosen + zeros.index_add(0, batch.sample_of_token, self._choices(probabilities))
            sums = sums + zeros.index_add(0, batch.sample_of_token, probabilities)
            rows = rows + zeros[:, 0].index_add(0, batch.sample_of_token, ones)
        squared = (rows * rows).unsqueeze(1)
        return self.coefficient * self.experts * (chosen * sums / squared).sum() / self._sequences

    def _probabilities(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Routing probabilities of the real tokens, without padding; shape (tokens, experts)."""
        assert batch.token_positions is not None, (
            "a mixture of experts needs to know which tokens are padding"
        )
        return (
            logits.flatten(0, -2)
            .index_select(0, batch.token_positions)
            .to(_at_least_fp32(logits))
            .softmax(-1)
        )

    def _choices(self, probabilities: Tensor) -> Tensor:
        """1 where an expert is among the top k; shape (tokens, experts), without gradient."""
        detached = probabilities.detach()
        return torch.zeros_like(detached).scatter_(1, detached.topk(self.top_k, dim=-1).indices, 1.0)


def load_balancing_loss_of(
    model: Any, scope: Literal["window", "sequence", "none"]
) -> LoadBalancingLoss | None:
    """The load-balancing loss of a model's config, or None if `scope` is \"none\", or if transformers adds
    none: its model may have a config with the same fields, but no such loss (Llama 4).

    Raises:
        CannotTrain: the coefficient or the number of active experts is not usable.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if scope == "none" or not (coefficient and experts and top_k):
        return None
    if not hasattr(sys.modules[type(inner).__module__], "load_balancing_loss_func"):
        return None
    if not all(isinstance(each, int | float) for each in (coefficient, experts, top_k)):
        return None  # fields of those names in another family's config
    if not 0 <= coefficient <= _MOST_COEFFICIENT:
        raise CannotTrain(
            "model_not_loaded",
            f"router_aux_loss_coef in the model's config.json is {coefficient}: use a number from 0 to "
            f"{_MOST_COEFFICIENT}, or set aux_scope to none",
        )
    if not 1 <= top_k <= experts:
        raise CannotTrain(
            "model_not_loaded",
            f"num_experts_per_tok in the model's config.json is {top_k}, but there are {experts} experts",
        )
    return LoadBalancingLoss(float(coefficient), int(experts), int(top_k), scope)


def has_unsupported_loss(model: Any) -> bool:
    """Whether transformers adds a load-balancing loss whose fields in the config are not those that
    `load_balancing_loss_of` reads (JetMoE, DBRX)."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    nested = getattr(config, "ffn_config", None)
    coefficient = getattr(config, "aux_loss_coef", None) or getattr(nested, "moe_loss_weight", None)
    return bool(coefficient) and hasattr(sys.modules[type(inner).__module__], "load_balancing_loss_func")


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
