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
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.contract.objective import ObjectiveSpec
from workers.training.attention import rows_known
from workers.training.batches import MicroBatch, Scoring
from workers.training.direct_sums import DirectSums, sum_of
from workers.training.head import Head, backbone_of, head_error, head_of
from workers.training.objectives import CORRECT, Objective
from workers.training.score_head import PROBED_CLASSES, probe_layer, score_error, score_layer_of

_FP16_GRADIENT_SCALE = 256.0
"""Keeps small probabilities above fp16's smallest numbers in the products of a chunk."""


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
        """It counts for micro-batches with a `scoring`; None for supervised fine-tuning and classification,
        whose loss is a sum over targets."""

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
            loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                hidden, head.weight, head.bias, batch.targets, batch.weights, self._smoothing, head, dtype,
                None if dtype == torch.float16 else factor,
                fused,
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
    """The cross-entropy of each hidden state's target, chunk by chunk."""
    parts = [slice(start, start + head.rows) for start in head.starts(len(hidden))]
    each = [_of_each(head.logits(hidden[part]), targets[part]) for part in parts]
    return torch.cat(each) if each else hidden.new_zeros(0)


class _ChunkedLoss(torch.autograd.Function):
    """Output head and cross-entropy in one; gradients are computed in the forward pass, chunk by chunk.

    With p = softmax(z) and the smoothed target q, dL/dz = weight × (p - q); the products with the head's
    weight and the hidden states follow at once, so that a chunk's logits are freed before the next chunk's
    are computed (the idea of Hsu et al. 2024, Liger Kernel, section 3.2). With a factor, by which the loss
    will be multiplied, the weight's gradient is added to its sum at once (`DirectSums`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        smoothing: float,
        head: Head,
        dtype: torch.dtype,
        factor: float | None,
        fused: Callable[..., Tensor] | None,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        wants_hidden, wants_weight, wants_bias = wanted
        heaviest = None
        if token_weights is not None and dtype == torch.float16:
            heaviest = token_weights.abs().amax() if len(token_weights) else token_weights.new_ones(())
            heaviest = torch.where(heaviest > 0, heaviest, torch.ones_like(heaviest))
            token_weights = token_weights / heaviest  # so that none leaves fp16's range
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight and factor is None else None
        sums = sum_of(weight) if wants_weight and factor is not None else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        matrix = weight.to(dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        rows = head.rows if fused is None else 2 * head.rows  # with logits in half the bytes
        for start in head.starts(len(hidden)) if fused is None else range(0, len(hidden), rows):
            part = slice(start, start + rows)
            states, own = hidden[part].to(dtype), targets[part].unsqueeze(1)
            narrow = F.linear(states, matrix, None if bias is None else bias.to(dtype))
            if fused is not None:
                total += fused(
                    narrow, targets[part], None if token_weights is None else token_weights[part],
                    scale=head.scale, smoothing=smoothing, with_gradient=any(wanted),
                ).sum()  # fmt: skip
                if to_hidden is not None:
                    to_hidden[part] = narrow @ matrix
                if to_weight is not None:
                    _add_product(to_weight, narrow, states, head)
                if to_bias is not None:
                    to_bias += narrow.sum(0, dtype=wide)
                del narrow
                continue
            logits = narrow.to(wide)
            del narrow
            slope: Tensor | float = head.scale
            if head.scale != 1.0:
                logits *= head.scale
            if head.cap is not None:
                logits = torch.tanh(logits.div_(head.cap))
                slope = (1.0 - logits * logits) * head.scale
                logits = logits * head.cap
            target = (1.0 - smoothing) * logits.gather(1, own)
            if smoothing:
                target = target + smoothing * logits.mean(-1, keepdim=True)
            largest = logits.amax(-1, keepdim=True)
            error = logits.sub_(largest).exp_()  # in place, as all that follows: one buffer for a chunk
            total_of_row = error.sum(-1, keepdim=True)
            losses = largest + total_of_row.log() - target
            if token_weights is not None:
                losses = losses * token_weights[part].unsqueeze(1)
            total += losses.sum()
            if not (wants_hidden or wants_weight or wants_bias):
                del logits, error, slope
                continue
            error /= total_of_row
            if smoothing:
                error -= smoothing / error.shape[1]
            error.scatter_add_(1, own, torch.full_like(own, -(1.0 - smoothing), dtype=wide))
            if token_weights is not None:
                error *= token_weights[part].unsqueeze(1)
            if head.scale != 1.0 or head.cap is not None:
                error *= slope
            up = _FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0
            narrow = (error * up if up != 1.0 else error).to(dtype)
            if to_hidden is not None:
                to_hidden[part] = (narrow @ matrix).to(wide) / up if up != 1.0 else narrow @ matrix
            if sums is not None:
                assert factor is not None
                if dtype == wide:
                    sums.addmm_(error.t(), states, alpha=factor)
                else:
                    sums.add_(narrow.t() @ states, alpha=factor)
            if to_weight is not None:
                if dtype != torch.float16:
                    _add_product(to_weight, narrow, states, head)
                else:  # a sum over the chunk's positions, which fp16 must hold too
                    share = up / len(states)
                    to_weight += ((error * share).to(dtype).t() @ states).to(wide) / share
            if to_bias is not None:
                to_bias += error.sum(0)
            del logits, error, slope, narrow  # else they would still be there beside the next chunk's logits
        if heaviest is not None:
            total = total * heaviest
            for gradient in (to_hidden, to_weight, to_bias):
                if gradient is not None:
                    gradient.mul_(heaviest)
        ctx.gradients = (to_hidden, to_weight, to_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the chunked loss computes its gradients once, so it supports only one backward"
            )
        found = [
            None if gradient is None else gradient.mul_(outer[0]).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return *found, None, None, None, None, None, None, None, None


def can_fuse(head: Head) -> bool:
    """Whether the kernel of fused_cross_entropy.py can compute the loss from a head's logits."""
    return head.cap is None and head.scale > 0.0


def _add_product(to: Tensor, errors: Tensor, states: Tensor, head: Head) -> None:
    """Adds errorsᵀ · states to a sum, in place.

    Args:
        to: at least fp32, of shape (vocabulary, width).
        errors: of shape (rows, vocabulary).
        states: of shape (rows, width), as precise as the errors.
    """
    if errors.dtype == to.dtype:
        to.addmm_(errors.t(), states)
    elif to.is_cuda and _adds_in_fp32(to.device):  # the product needs no tensor of its own
        torch.ops.aten.addmm.dtype_out(to, errors.t(), states, to.dtype, out=to)
    elif head.device == "cuda" and not to.is_cuda:  # in the simulation of a GPU, only sizes count
        to.add_(0.0)
    else:
        to += errors.t() @ states


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether this GPU's library adds products of bf16 to a matrix in fp32."""
    try:
        sums, factor = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device).bfloat16()
        torch.ops.aten.addmm.dtype_out(sums, factor, factor, torch.float32, out=sums)
    except (RuntimeError, AttributeError):
        return False
    return True


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
