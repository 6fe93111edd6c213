"""What a loss needs to know of a whole window before its first micro-batch, found without gradient.

A mixture of experts balances the load of the window; KTO compares with the mean divergence over the window;
ORPO adds a mean over the window's tokens to a mean over its pairs.
"""

import numpy as np
import torch
from torch.profiler import record_function

from workers.training.data.batch_loader import Indices
from workers.training.data.preparation import Samples
from workers.training.distributed.group import Group
from workers.training.losses.load_balancing_loss import LoadBalancingLoss
from workers.training.losses.objectives import Objective
from workers.training.micro_batches.batches import Groups, MicroBatch
from workers.training.passes import run_each_micro_batch
from workers.training.training_run import TrainingRun


def run_prepass(training: TrainingRun, window: Indices, groups: list[Groups], group: Group) -> None:
    """Determines what the loss of a window needs to know of all of it.

    Args:
        groups: the micro-batches of each rank.
        group: the ranks that accumulate the window together.

    Raises:
        OtherRankFailed: another rank could not do its part.
    """
    if (objective := training.replica.token_loss.objective) is not None:
        _observe_objective(training, objective, window, groups, group)
    if (balance := training.replica.balance) is not None:
        _observe_routing(training, balance, window, groups, group)


def tokens_factor(samples: Samples, window: Indices) -> float:
    """See `Objective.tokens_factor`."""
    weights = samples.weights[window].astype(np.float64) * (samples.targets[window] > 0)
    tokens = float(np.dot(weights, samples.sequence_lengths[window, 0] - 1))
    return float(weights.sum()) / tokens if tokens else 0.0


def _observe_objective(
    training: TrainingRun, objective: Objective, window: Indices, groups: list[Groups], group: Group
) -> None:
    """Sets ORPO's `tokens_factor`, or KTO's `divergence` by a forward pass of each mismatch."""
    replica, loader = training.replica, training.loader
    if objective.spec.name == "orpo":
        objective.tokens_factor = tokens_factor(loader.samples, window)
    if objective.spec.name != "kto":
        return
    objective.divergence = None
    sums = torch.zeros(2, dtype=torch.float64, device=replica.device)

    def add_divergence(samples: list[int]) -> None:
        sums.add_(replica.divergence(loader.fetch_mismatches(samples)))

    def take_part(batch: MicroBatch) -> None:
        replica.scores(batch)

    with record_function("accrue.divergence"):
        run_each_micro_batch(training, window, groups, group, add_divergence, take_part)
    if group.size > 1:
        sums = sums.new_tensor(group.sum(sums.tolist()))
    objective.set_divergence(sums)


def _observe_routing(
    training: TrainingRun, balance: LoadBalancingLoss, window: Indices, groups: list[Groups], group: Group
) -> None:
    """Counts the routers' choices of a mixture of experts. The pass draws the same random numbers as the one
    with gradient, so that both route the same way."""
    replica, loader = training.replica, training.loader
    balance.begin(len(window) * loader.samples.sequences)
    if balance.scope != "window":
        return
    with record_function("accrue.routing"):
        run_each_micro_batch(
            training,
            window,
            groups,
            group,
            lambda samples: replica.observe_routing(loader.fetch(samples)),
            replica.route_nothing,
        )
    balance.sum_over(group, replica.device)
