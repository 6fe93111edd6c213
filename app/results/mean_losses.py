"""Training losses as means over equally many samples.

A loss of one window, or a moving average over steps, covers more samples with a larger batch. Jobs with other
batch sizes can be compared only by means over the same number of samples.
"""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, case, func, select

from app.storage.session import Session
from app.storage.tables import Job, StepMetric

LARGEST_LOSS = 1e6
"""Larger losses count as this, so that a single one leaves the digits of all others in a sum."""

_WINDOWS, _SHARE = 10, 4


def averaged_samples(batches: Iterable[int], seen: int) -> int:
    """The number of samples over which losses are averaged: ten windows of the largest batch, but at most a
    quarter of the samples, and at least one window.

    Args:
        batches: the jobs' effective batch sizes.
        seen: samples that all of the jobs have seen.
    """
    largest = max(batches)
    return max(largest, min(_WINDOWS * largest, seen // _SHARE))


def summed_loss() -> ColumnElement[float]:
    """A window's loss times its samples."""
    bounded = case(
        (StepMetric.loss > LARGEST_LOSS, LARGEST_LOSS),
        (StepMetric.loss < -LARGEST_LOSS, -LARGEST_LOSS),
        else_=StepMetric.loss,
    )
    return bounded * StepMetric.samples


def means_of_last(session: Session, jobs: Sequence[Job]) -> Mapping[str, float]:
    """Each job's mean training loss over its last N samples. N is the same for all jobs; the jobs that have
    succeeded determine it (all jobs, if none has). Jobs that have seen fewer than N samples are left out."""
    own = {job.id: job for job in jobs}
    of_each = select(StepMetric.job_id, func.sum(StepMetric.samples), func.max(StepMetric.step))
    of_each = of_each.where(StepMetric.job_id.in_(list(own)), StepMetric.samples > 0)
    found = session.execute(of_each.group_by(StepMetric.job_id)).all()
    if not found:
        return {}
    ended = [row for row in found if own[row[0]].status == "succeeded"] or found
    batches = [own[job_id].spec["effective_batch_size"] for job_id, _, _ in ended]
    samples = averaged_samples(batches, min(int(seen) for _, seen, _ in ended))
    means = {}
    for job_id, seen, last in found:
        if seen < samples:
            continue
        steps = select(StepMetric.samples, summed_loss().label("loss")).where(
            StepMetric.job_id == job_id, StepMetric.samples > 0, StepMetric.step > last - samples
        )
        means[job_id] = _mean(session.execute(steps.order_by(StepMetric.step.desc())).all(), samples)
    return means


def _mean(newest_first: Iterable[tuple[int, float]], samples: int) -> float:
    """The mean loss of the last samples; of the oldest window, as many samples count as are needed."""
    left, total = samples, 0.0
    for own, loss in newest_first:
        counted = min(own, left)
        total += loss * counted / own
        left -= counted
        if not left:
            break
    return total / (samples - left)
