"""What is done where a window cannot go on: the samples at fault, smaller micro-batches, or the end."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.training.batches import Groups
from workers.training.faults import CannotTrain
from workers.training.window import Closed, Window

MAX_SKIPPED_IN_A_ROW = 10
"""So many windows that cannot be applied, one after another, end the job."""

Indices = npt.NDArray[np.int64]


def close(window: Window) -> Closed:
    """Closes a window.

    Raises:
        CannotTrain: the optimizer's step itself runs out of memory, which smaller micro-batches do not mend.
    """
    try:
        return window.close()
    except torch.OutOfMemoryError:
        raise CannotTrain(
            "out_of_memory",
            "out of memory in the optimizer's step, which does not depend on the micro-batch: freeze some of "
            "the model, choose sgd, or use a GPU with more memory",
        ) from None


def samples_at_fault(
    window: Window, loss_of: Callable[[int], Tensor], samples: Indices, targets_of: Indices
) -> list[int]:
    """The samples whose loss or gradient is not finite on its own: each is replayed alone.

    Args:
        loss_of: the summed loss of one sample.
        samples: those of the window that was not applied.
        targets_of: target tokens by sample; one without any cannot be at fault.
    """
    faults = []
    for sample in samples.tolist():
        if targets_of[sample] == 0:
            continue
        window.open(denominator=int(targets_of[samples].sum()))
        window.add(loss_of(sample))
        if not window.finite():
            faults.append(sample)
    return faults


def give_up_after_too_many(skipped_in_a_row: int) -> None:
    """Raises:
    CannotTrain: so many windows in a row could not be applied that no other will.
    """
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise CannotTrain(
            "diverged",
            f"{MAX_SKIPPED_IN_A_ROW} windows in a row could not be applied: lower the learning rate, "
            "and look at the samples that the events name",
        )


def smaller_budget(groups: Groups, lengths: Indices, *, allowed: bool) -> int:
    """Half of the largest micro-batch's tokens.

    Raises:
        CannotTrain: it is a single sample already, or smaller micro-batches are not allowed.
    """
    widest = max(groups, key=lambda group: len(group) * int(lengths[group].max()))
    tokens = len(widest) * int(lengths[widest].max())
    if len(widest) == 1 or not allowed:
        raise CannotTrain(
            "out_of_memory",
            f"out of memory at a micro-batch of {len(widest)} samples and {tokens} tokens: lower max_length, "
            "set gradient_checkpointing, leave auto_adjust_batch_size on, or use a GPU with more memory",
        )
    return tokens // 2
