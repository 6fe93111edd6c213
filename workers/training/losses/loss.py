"""The loss: the weighted sum of the target tokens' cross-entropies, to be divided by the window's count once;
or, with an objective other than supervised fine-tuning, a sum over samples.

Only positions whose next token counts reach the output head; logits of prompts and padding are never
computed. If a model's logits are those of its head, perhaps scaled or soft-capped, they are computed for a
chunk of positions at a time, so that the full matrix (tokens × vocabulary) never exists. For other models,
the model's own logits are used.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.contract.objective import ObjectiveSpec
from workers.training.gradients.direct_sums import DirectSums, Products
from workers.training.kernels.attention import rows_known
from workers.training.losses.chunked_loss import ChunkedLoss, can_fuse
from workers.training.losses.objectives import CORRECT, Objective
from workers.training.micro_batches.batches import MicroBatch, Scoring
from workers.training.models.head import Head, backbone_of, head_error, head_of
from workers.training.models.score_head import PROBED_CLASSES, probe_layer, score_error, score_layer_of


@dataclass(frozen=True)
class Forward:
    """The result of a forward pass: the summed loss (a scalar, at least fp32) and the logits of routers.

    If the loss was not to be summed, `loss_sum` has the shape (targets,). With `only_score`, it holds
    log-probabilities; with `probe_head`, the error of the head's logits.

    `router_logits` holds one tensor of shape (rows × sequence, experts) for each layer with experts.
    """

    loss_sum: Tensor
    router_logits: tuple[Tensor, ...] = ()
    correct: Tensor | None = None
    """The weighted number of targets that are the most likely token, or of pairs in the right order, a
    scalar; None if they were not counted."""
    exact: Tensor | None = None
    """The number of sequences of which every target is the most likely token, so that greedy decoding gives
    exactly these targets; a scalar, None if they were not counted."""
    measured: Tensor | None = None
    """See `Objective.measured`; None without a preference objective."""


class TokenLoss(nn.Module):
    """A model with its loss: maps a micro-batch to its summed loss.

    It wraps the model, so that FSDP can hook this module's forward pass.

    Args:
        model: a causal language model.
        smoothing: the share of the target's probability that is spread evenly over the vocabulary
            (Szegedy et al. 2016, section 7).
        chunked: whether to compute the head's logits in chunks, if possible.
        routed: whether to return the router logits, too.
    """

    def __init__(
        self, model: Any, *, smoothing: float = 0.0, chunked: bool = True, routed: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._smoothing = smoothing
        self._arguments = {"output_router_logits": True} if routed else {}
        self._caching = {"use_cache": False} if takes(model, "use_cache") else {}
        self.head = head_of(model) if chunked else None
        score = score_layer_of(model)
        self.probes = score is not None
        """Whether the head is a probe (`probe_layer`), until `begin_objective`."""
        if score is not None:
            self.head = Head(probe_layer(score), 1.0, None)
        self.passes_boundaries = False
        """Whether the model gets the places where samples of a packed row begin, for flash-attn, which would
        otherwise read that from the device in each layer."""
        self.fused: Callable[..., Tensor] | None = None
        """Computes the cross-entropy of a chunk of bf16 logits in one kernel (fused_cross_entropy.py)."""
        self.direct: DirectSums | None = None
        """Adds the gradient of the head's weight to its sum while a window is open."""
        self.objective: Objective | None = None
        """Computes the loss of micro-batches that have a `scoring`; None for supervised fine-tuning and
        classification, whose loss is a sum over targets."""

    def begin_objective(self, spec: ObjectiveSpec) -> None:
        """From now on, the loss is that of an objective other than supervised fine-tuning."""
        score = score_layer_of(self.model)
        if score is not None:
            self.head, self.probes = Head(score, 1.0, None), False
        if spec.name != "classification":
            self.objective = Objective(spec)

    def forward(
        self,
        batch: MicroBatch,
        *,
        only_route: bool = False,
        summed: bool = True,
        probe_head: bool = False,
        evaluates: bool = False,
        only_score: bool = False,
    ) -> Forward:
        """Computes the loss of a micro-batch.

        Args:
            only_route: compute only the logits of routers.
            summed: false gives the loss of each target; without label smoothing, weights or gradient.
            probe_head: compute `head_error` instead.
            evaluates: also count the correct predictions; without label smoothing or gradient.
            only_score: the log-probability of each part of the batch's `scoring`, of shape (parts,), without
                gradient, in place of the loss.
        """
        if self.probes:
            assert self.head is not None
            self.head.layer.to(batch.input_ids.device)
            batch = replace(batch, targets=batch.targets % PROBED_CLASSES)
        with rows_known(packed=batch.position_ids is not None):
            if only_score or (evaluates and batch.scoring is not None):
                return self._score(batch, only=only_score)
            if evaluates:
                return self._evaluate(batch)
            return self._forward(batch, only_route, summed, probe_head)

    def _evaluate(self, batch: MicroBatch) -> Forward:
        """The summed loss, and how many targets are the most likely token, chunk by chunk."""
        arguments, positions = self._arguments_for(batch), batch.target_positions
        if self.head is None:
            output = self.model(input_ids=batch.input_ids, **arguments)
            found = [(slice(None), output.logits.flatten(0, 1).index_select(0, positions))]
        else:
            output = backbone_of(self.model)(input_ids=batch.input_ids, **arguments)
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, positions)
            parts = [slice(start, start + self.head.rows) for start in self.head.starts(len(hidden))]
            found = ((part, self.head.logits(hidden[part])) for part in parts)  # type: ignore[assignment]
        loss = torch.zeros((), dtype=torch.float64, device=positions.device)
        correct, hits = torch.zeros_like(loss), []
        for part, logits in found:
            targets = batch.targets[part]
            weights = 1.0 if batch.weights is None else batch.weights[part]
            loss += (_of_each(logits, targets) * weights).sum()
            hits.append(logits.argmax(-1) == targets)
            correct += (hits[-1] * weights).sum()
        return Forward(loss, correct=correct, exact=_all_hit(hits, batch))

    def _score(self, batch: MicroBatch, *, only: bool) -> Forward:
        """The log-probabilities, or what the objective makes of them, without gradient."""
        arguments, positions = self._arguments_for(batch), batch.target_positions
        with torch.no_grad():
            if self.head is None:
                output = self.model(input_ids=batch.input_ids, **arguments)
                each = _of_each(output.logits.flatten(0, 1).index_select(0, positions), batch.targets)
            else:
                output = backbone_of(self.model)(input_ids=batch.input_ids, **arguments)
                hidden = output.last_hidden_state.flatten(0, 1).index_select(0, positions)
                if self._scores_sequences:
                    return self._by_scores(hidden, batch, self.head)
                each = _of_each_state(hidden, batch.targets, self.head)
            scores = _scores(each, batch.scoring)
            return Forward(scores) if only else self._compared(scores, batch.scoring)

    def _compared(self, scores: Tensor, scoring: Scoring | None) -> Forward:
        """What the objective makes of log-probabilities."""
        assert self.objective is not None, "micro-batches have a scoring if there is an objective"
        assert scoring is not None
        loss = (self.objective.losses(scores, scoring) * scoring.weights).sum()
        measured = self.objective.measured(scores, scoring)
        return Forward(loss, correct=measured[CORRECT], measured=measured)

    @property
    def _scores_sequences(self) -> bool:
        return self.objective is not None and self.objective.spec.scores_sequences

    def _by_scores(self, hidden: Tensor, batch: MicroBatch, head: Head) -> Forward:
        """The loss from the hidden states at which each sequence's score is read."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(wide)
            scores = F.linear(hidden.to(wide), head.weight.to(wide), bias).squeeze(1)
            return self._compared(scores.to(torch.float64), batch.scoring)

    def _by_objective(self, hidden: Tensor, batch: MicroBatch, head: Head) -> Forward:
        """The loss of a preference objective from the hidden states of the targets.

        The objective is a function of a few sums of log-probabilities, so its gradient is that of the
        targets' cross-entropies, each weighted by the objective's derivative. A first pass over the output
        head gives the sums, and thereby the weights; the chunked loss is then computed with these.
        """
        if self._scores_sequences:
            return self._by_scores(hidden, batch, head)
        with torch.no_grad():
            scores = _scores(_of_each_state(hidden.detach(), batch.targets, head), batch.scoring)
        with torch.enable_grad():
            compared = self._compared(scores.requires_grad_(), batch.scoring)
            (slopes,) = torch.autograd.grad(compared.loss_sum, scores)
        if not torch.is_grad_enabled():
            return replace(compared, loss_sum=compared.loss_sum.detach())
        assert batch.scoring is not None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = -slopes.index_select(0, batch.scoring.part_of_target).to(wide)
        weighted = self._of_hidden(hidden, replace(batch, weights=weights), head)
        return replace(compared, loss_sum=compared.loss_sum.detach() + (weighted - weighted.detach()))

    def _forward(self, batch: MicroBatch, only_route: bool, summed: bool, probe_head: bool) -> Forward:
        arguments = self._arguments_for(batch)
        if probe_head:
            assert self.head is not None, "there is nothing to compare with the model's own logits"
            if score_layer_of(self.model) is self.head.layer:
                return Forward(self._score_error(batch, arguments))
            return Forward(head_error(self.model, self.head, batch.input_ids, arguments))
        if only_route:
            output = backbone_of(self.model)(input_ids=batch.input_ids, **arguments)
            return Forward(torch.zeros(()), tuple(output.router_logits))
        if self.head is None:
            output = self.model(input_ids=batch.input_ids, **arguments)
            logits = output.logits.flatten(0, 1).index_select(0, batch.target_positions)
            if batch.scoring is not None and summed:
                compared = self._compared(
                    _scores(_of_each(logits, batch.targets), batch.scoring), batch.scoring
                )
                return replace(compared, router_logits=self._routed(output))
            loss = self._of_logits(logits, batch) if summed else _of_each(logits, batch.targets)
        else:
            output = backbone_of(self.model)(input_ids=batch.input_ids, **arguments)
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.target_positions)
            if batch.scoring is not None and summed:
                return replace(
                    self._by_objective(hidden, batch, self.head), router_logits=self._routed(output)
                )
            loss = (
                self._of_hidden(hidden, batch, self.head)
                if summed
                else _of_each_state(hidden, batch.targets, self.head)
            )
        return Forward(loss, self._routed(output))

    def _score_error(self, batch: MicroBatch, arguments: dict[str, Any]) -> Tensor:
        """See `score_error`."""
        assert self.head is not None
        output = backbone_of(self.model)(input_ids=batch.input_ids, **arguments)
        hidden, end = output.last_hidden_state[0], int(batch.target_positions[0])
        return score_error(self.model, self.head.layer, hidden, end, batch.input_ids, arguments)

    def _routed(self, output: Any) -> tuple[Tensor, ...]:
        return tuple(output.router_logits) if self._arguments else ()

    def stop_routing(self) -> None:
        """Returns no router logits from now on."""
        self._arguments = {}

    def router_logits(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The logits of the routers, computed without loss or gradient."""
        with torch.no_grad():
            found: Forward = self(batch, only_route=True)  # by this module's hooks
        return found.router_logits

    def _arguments_for(self, batch: MicroBatch) -> dict[str, Any]:
        packed: dict[str, Any] = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        if packed and self.passes_boundaries:
            packed |= boundaries(batch)
        return {**self._arguments, **packed, **self._caching}

    def _of_logits(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        reduction = "sum" if batch.weights is None else "none"
        losses = F.cross_entropy(logits, batch.targets, reduction=reduction, label_smoothing=self._smoothing)
        return losses if batch.weights is None else (losses * batch.weights.to(losses.dtype)).sum()

    def _of_hidden(self, hidden: Tensor, batch: MicroBatch, head: Head) -> Tensor:
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        plain = head.cap is None and head.scale == 1.0 and not self._smoothing and batch.weights is None
        precise = autocast is None and hidden.dtype in (torch.float32, torch.float64)
        several = len(hidden) > head.rows and hidden.dtype == head.weight.dtype
        factor = self.direct.factor_for(head.weight) if self.direct is not None else None
        if factor is None and plain and precise and several and hasattr(F, "linear_cross_entropy"):
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=head.rows)
            return F.linear_cross_entropy(
                hidden,
                head.weight,
                batch.targets,
                linear_bias=head.bias,
                reduction="sum",
                options=options,
            )
        dtype = autocast or torch.promote_types(hidden.dtype, head.weight.dtype)
        fused = self.fused if dtype == torch.bfloat16 and factor is None and can_fuse(head) else None
        with torch.autocast(kind, enabled=False):
            loss: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                hidden, head.weight, head.bias, batch.targets, batch.weights, self._smoothing, head, dtype,
                None if dtype == torch.float16 else factor,
                fused,
                Products() if self.direct is None or factor is None else self.direct.products,
                tuple(
                    torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
                    for tensor in (hidden, head.weight, head.bias)
                ),
            )  # fmt: skip
        return loss


def _all_hit(hits: list[Tensor], batch: MicroBatch) -> Tensor:
    """The number of sequences with targets all of which are hits, in fp64."""
    counts = torch.tensor(batch.target_counts)
    missed = torch.zeros(len(counts), dtype=torch.int64, device=batch.targets.device)
    if hits:
        sequence = torch.arange(len(counts)).repeat_interleave(counts).to(missed.device)
        missed.index_add_(0, sequence, (~torch.cat(hits)).to(torch.int64))
    has_targets = (counts > 0).to(missed.device)
    return (has_targets & (missed == 0)).sum().to(torch.float64)


def _scores(each: Tensor, scoring: Scoring | None) -> Tensor:
    """The log-probability of each part, in fp64, from the cross-entropies of the targets."""
    assert scoring is not None
    zeros = torch.zeros(scoring.parts, dtype=torch.float64, device=each.device)
    return zeros.index_add(0, scoring.part_of_target, -each.to(torch.float64))


def _of_each(logits: Tensor, targets: Tensor) -> Tensor:
    """Each target's cross-entropy."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none")


def _of_each_state(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """The cross-entropy of each hidden state's target, chunk by chunk. Has no gradient."""
    parts = [slice(start, start + head.rows) for start in head.starts(len(hidden))]
    each = [_of_each_in_place(head.logits(hidden[part]), targets[part]) for part in parts]
    return torch.cat(each) if each else hidden.new_zeros(0)


def _of_each_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Each target's cross-entropy. Needs no memory besides the logits, which it overwrites."""
    logits.sub_(logits.amax(1, keepdim=True))
    own = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return logits.exp_().sum(1).log_() - own


def boundaries(batch: MicroBatch) -> dict[str, Any]:
    """Where the samples of a packed row begin and end, and the longest one, as flash-attn takes them."""
    ends = torch.zeros(len(batch.lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(batch.lengths), 0, out=ends[1:])
    if batch.input_ids.is_cuda:
        ends = ends.pin_memory().to(batch.input_ids.device, non_blocking=True)
    longest = max(batch.lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def takes(model: Any, argument: str) -> bool:
    """Whether a model's forward pass accepts this argument."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(inner.forward).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
