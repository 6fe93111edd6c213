"""How many forward passes each rank makes in a window, and the filler that it uses once its own micro-batches
are used up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from workers.training.data.batch_loader import Indices
from workers.training.distributed.group import Group
from workers.training.exceptions import InterruptionRequested, OtherRankFailed
from workers.training.micro_batches.batches import Groups, MicroBatch
from workers.training.training_run import TrainingRun


def passes_of_rank(training: TrainingRun, groups: Sequence[Groups]) -> int:
    """The number of passes that this rank makes. If each pass exchanges data, all ranks make equally many;
    otherwise, one per micro-batch, but at least one if the model is sharded."""
    counts, parameters = [len(own) for own in groups], training.replica.parameters
    own = counts[training.group.rank]
    if not parameters.is_sharded:
        return own
    return max(counts) if parameters.exchanges_in_each_pass else max(1, own)


def share_of_rank(groups: Groups, group: Group, *, equally: bool) -> tuple[Groups, int]:
    """This rank's part of micro-batches that any rank may compute, and how many of its passes count.

    Args:
        equally: whether all ranks must make equally many passes: ranks with fewer micro-batches repeat the
            last one, and discard its results.
    """
    own = groups[group.rank :: group.size]
    repeated = -(-len(groups) // group.size) - len(own) if equally else 0
    return [*own, *groups[-1:] * repeated], len(own)


def filler(training: TrainingRun, window: Indices) -> MicroBatch:
    """A small micro-batch with which a rank takes part in the passes of others."""
    counted = window[training.loader.samples.targets[window] > 0]
    shortest = counted[np.argmin(training.loader.samples.lengths[counted])]
    return training.loader.fetch([int(shortest)])


def run_each_micro_batch(
    training: TrainingRun,
    window: Indices,
    groups: list[Groups],
    group: Group,
    run: Callable[[list[int]], None],
    take_part: Callable[[MicroBatch], None],
) -> None:
    """Runs a forward pass of each of this rank's micro-batches, before the passes that add to the gradient.

    Args:
        window: indices of the window's samples.
        groups: the micro-batches of each rank, as positions in the window.
        run: called with the samples of each micro-batch.
        take_part: called where only other ranks have a micro-batch left.

    Raises:
        OtherRankFailed: another rank could not do its part.
        InterruptionRequested, RuntimeError: this rank could not.
    """
    own = groups[group.rank]
    with failing_together(group, is_sharded=training.replica.is_sharded):
        for each in own:
            training.check_interruption()
            run(window[each].tolist())
        for _ in range(passes_of_rank(training, groups) - len(own)):
            take_part(filler(training, window))


@contextmanager
def failing_together(group: Group, *, is_sharded: bool) -> Iterator[None]:
    """Waits after the block until all ranks have ended theirs, so that none waits in vain for one whose block
    failed.

    Args:
        is_sharded: whether ranks hold parts of the model. They wait for each other in every pass, so an error
            is raised at once, instead of after all blocks have ended.

    Raises:
        OtherRankFailed: another rank's block failed.
        InterruptionRequested, RuntimeError: this rank's did.
    """
    failure: Exception | None = None
    try:
        yield
    except (InterruptionRequested, RuntimeError) as error:
        if is_sharded:
            raise
        failure = error
    (failed,) = group.any(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise OtherRankFailed
