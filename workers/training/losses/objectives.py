"""Objectives over samples: the loss of each as a function of its sequences' log-probabilities, or of their
scores.

Each is a sum over samples, so it accumulates exactly: a window's loss is that of all of its samples, divided
once by the sum of their weights. What an objective needs to know of the whole window (KTO's divergence,
ORPO's number of tokens) is determined before its first micro-batch (window_scope.py).

Sources: DPO, Rafailov et al. 2023, equation 7, with label smoothing as in Mitchell 2023 (cDPO); ORPO, Hong
et al. 2024, equations 4 to 7; SimPO, Meng et al. 2024, equation 6; KTO, Ethayarajh et al. 2024, equations 7
and 8; reward, Ouyang et al. 2022, equation 1, with rewards centered as in Eisenstein et al. 2023, section 4.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.contract.objective import ObjectiveSpec
from workers.training.micro_batches.batches import Scoring

MEASURED, CORRECT = 7, 4
"""The length of what is measured of a micro-batch, and the place of the pairs in the right order
(`Objective.measured`)."""


@dataclass
class Objective:
    """An objective over samples, and what it knows of the current window."""

    spec: ObjectiveSpec
    tokens_factor: float = 0.0
    """ORPO: samples of the window divided by tokens of its chosen sequences, both weighted. The mean over
    tokens then becomes part of a sum over samples."""
    divergence: Tensor | None = None
    """KTO: the mean over the window of the log-probabilities of mismatches, minus those of the reference; a
    scalar, at least 0. None is 0."""

    def losses(self, log_probs: Tensor, scoring: Scoring) -> Tensor:
        """The loss of each sample, of shape (samples,).

        Args:
            log_probs: the summed log-probabilities of the targets of each part of `scoring`, or for `reward`
                the score of each sequence; of shape (parts,).
        """
        own, spec = log_probs[: scoring.sequences], self.spec
        if spec.name == "kto":
            assert scoring.desirable is not None, "a label of each completion"
            ratios = own - scoring.reference
            against = ratios.new_zeros(()) if self.divergence is None else self.divergence.to(ratios)
            away = spec.beta * (ratios - against)
            return torch.where(
                scoring.desirable,
                spec.desirable_weight * (1 - torch.sigmoid(away)),
                spec.undesirable_weight * (1 - torch.sigmoid(-away)),
            )
        if spec.name == "reward":
            chosen, rejected = own.view(-1, 2).unbind(1)
            centered = spec.center_rewards_coefficient * (chosen + rejected) ** 2
            return centered - F.logsigmoid(chosen - rejected)
        if spec.name == "dpo":
            chosen, rejected = (own - scoring.reference).view(-1, 2).unbind(1)
            margin = spec.beta * (chosen - rejected)
            share = spec.label_smoothing
            return -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)
        chosen, rejected = (own / scoring.counted).view(-1, 2).unbind(1)
        if spec.name == "simpo":
            return -F.logsigmoid(spec.beta * (chosen - rejected) - spec.gamma)
        odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        whole = own.view(-1, 2)[:, 0] + log_probs[scoring.sequences :]
        return -spec.beta * F.logsigmoid(odds) - self.tokens_factor * whole

    def measured(self, log_probs: Tensor, scoring: Scoring) -> Tensor:
        """Weighted sums over the samples, of shape (MEASURED,), without gradient: rewards of chosen (or
        desirable) and of rejected sequences, their log-probabilities, pairs in the right order, and the
        weights of chosen and of rejected sequences."""
        own = log_probs.detach()[: scoring.sequences]
        rewards, weights = self._rewards(own, scoring), scoring.weights
        if scoring.desirable is not None:
            chosen, rejected = weights * scoring.desirable, weights * ~scoring.desirable
            sums = [
                chosen * rewards, rejected * rewards, chosen * own, rejected * own, 0 * own, chosen, rejected,
            ]  # fmt: skip
            return torch.stack([each.sum() for each in sums])
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        in_order = (chosen > rejected).to(own.dtype)
        each_pair = (chosen, rejected, *own.view(-1, 2).unbind(1), in_order)
        sums = [(weights * each).sum() for each in each_pair]
        return torch.stack([*sums, weights.sum(), weights.sum()])

    def _rewards(self, own: Tensor, scoring: Scoring) -> Tensor:
        """The reward of each sequence, which preference objectives define implicitly, as in their papers."""
        if self.spec.scores_sequences:
            return own
        if self.spec.has_reference:
            return self.spec.beta * (own - scoring.reference)
        return self.spec.beta * own / scoring.counted

    def set_divergence(self, sums: Tensor) -> None:
        """Uses the mean of the mismatches' log-ratios, at least 0.

        Args:
            sums: their weighted sum, and the sum of the weights.
        """
        self.divergence = (sums[0] / sums[1].clamp(min=1e-30)).clamp(min=0.0)


def log1mexp(log_probability: Tensor) -> Tensor:
    """log(1 - p) from log p, precise for all p (Mächler 2012, Accurately Computing log(1 - exp(-|a|)))."""
    tiny = torch.finfo(log_probability.dtype).tiny
    below = log_probability.clamp(max=-tiny)  # a probability of 1 has infinite odds
    near_one = below > -0.6931471805599453
    return torch.where(
        near_one,
        torch.log(-torch.expm1(torch.where(near_one, below, below.new_full((), -0.5)))),
        torch.log1p(-torch.exp(torch.where(near_one, below.new_full((), -1.0), below))),
    )
