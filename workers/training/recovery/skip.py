"""Windows that make no step: which samples are at fault."""

import numpy as np
import torch

from workers.training.accumulate import TrainedWindow
from workers.training.data.batch_loader import Indices
from workers.training.recovery import guards
from workers.training.training_run import TrainingRun
from workers.training.window import at_safe_loss_scale

_MAX_SAMPLES_LISTED = 1000
"""The maximum number of samples that the event of a skipped window lists."""


def skip(training: TrainingRun, window: Indices, trained: TrainedWindow | None) -> None:
    """Counts a window that made no step, names the samples at fault, and gives up after too many."""
    progress, samples = training.state.progress, training.loader.samples
    progress.skipped += 1
    if trained is None:
        # At most two events for each epoch: data that mostly have no weight would fill the log with them.
        position = training.state.position  # of the next window
        is_last = position.consumed == 0
        epoch = position.epoch - is_last
        is_first = epoch != training.epoch_of_empty_window
        training.epoch_of_empty_window = epoch
        if not is_first and not is_last:
            return
        message = "Step skipped: none of its tokens count toward the loss."
        if not is_last:
            message += " Further ones of this epoch are counted, but not reported."
        named = window.tolist()
    else:
        progress.skipped_in_a_row += 1
        counted = window[samples.targets[window] > 0]
        named = []
        if trained.result.rejected_by_filter:
            reason = f"its loss of {trained.result.loss:.4g} is a spike."
            found = "Samples with the highest losses"
            if training.group.leads and not training.replica.is_sharded:
                named = _highest_losses(training, counted)
        else:
            reason, found = "its loss or gradient is not finite.", "Samples that cause it"
            whole = samples.denominator(window)
            if training.group.leads and not training.replica.is_sharded:
                with at_safe_loss_scale(training.replica.loss_scale):
                    named = guards.samples_at_fault(
                        training.replica.window,
                        lambda s: _add_alone(training, s, whole),
                        counted,
                        training.interrupted,
                    )
        training.group.wait()
        if training.replica.is_sharded:
            which = "The samples that cause it were not searched for, since the model is sharded."
        elif named:
            which = (
                f"{found}, numbered from 0 among the training samples (held-out ones are not counted): "
                f"{', '.join(map(str, named))}."
            )
        else:
            which = "No single sample causes it."
        message = f"Step skipped: {reason} {which}"
    training.reporter.event(
        "skipped", message, "warning", samples=named[:_MAX_SAMPLES_LISTED], skipped=progress.skipped
    )
    guards.give_up_after_too_many(progress.skipped_in_a_row)


def _add_alone(training: TrainingRun, sample: int, denominator: float) -> None:
    """Opens a window with the whole window's denominator, and adds one of its samples."""
    replica, batch = training.replica, training.loader.fetch([sample])
    replica.window.open(denominator)
    if replica.balance is not None:
        replica.balance.begin(training.loader.samples.sequences)
        if replica.balance.scope == "window":
            replica.observe_routing(batch)
    replica.add(batch)


def _highest_losses(training: TrainingRun, window: Indices, count: int = 5) -> list[int]:
    """The samples with the highest mean loss, highest first."""
    sums: list[torch.Tensor] = []
    loader = training.loader
    with torch.no_grad():
        for sample in window.tolist():
            if training.interrupted():
                return []
            sums.append(training.replica.forward(loader.fetch([sample])).loss_sum)
    own = np.array([loader.samples.denominator(window[[i]]) for i in range(len(window))])
    means = np.asarray(torch.stack(sums).tolist()) / own
    found: list[int] = window[np.argsort(-means)[:count]].tolist()
    return found
