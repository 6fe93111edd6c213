"""Several jobs side by side: their losses at the same number of samples seen, and how noisy each is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sqlalchemy import select

from app.errors import Conflict
from app.jobs import configurations, transitions
from app.results.schemas import ComparedJob, Comparison
from app.statistics import performance
from app.storage.session import Session
from app.storage.tables import Job, StepMetric

MAX_POINTS = 500


@dataclass(frozen=True)
class _Run:
    job: Job
    samples: list[int]
    """Seen after each step."""
    losses: list[float]
    """The loss of each step's window."""
    smooth: list[float]
    """The same, as an exponential moving average."""


def compare(session: Session, ids: Sequence[str], points: int) -> Comparison:
    """Aligns the losses of several jobs by the number of samples seen.

    Args:
        ids: ids of jobs or of configurations; a configuration stands for its newest job.
        points: the number of points in each aligned series.

    Raises:
        NotFound: a job does not exist.
        Conflict: a job has fewer than two steps, or the jobs have no range of samples in common.
    """
    runs = [_run(session, _job(session, each)) for each in ids]
    first, last = max(run.samples[0] for run in runs), min(run.samples[-1] for run in runs)
    if first > last:
        raise Conflict(
            "These jobs cannot be compared: one ended after fewer samples than another's first step."
        )
    grid = [first + (last - first) * number / (points - 1) for number in range(points)]
    noises = [_noise(run.losses) for run in runs]
    return Comparison(
        samples_seen=grid,
        loss={run.job.id: _interpolate(grid, run.samples, run.smooth) for run in runs},
        jobs=[
            ComparedJob(
                training_id=run.job.id,
                model_name=run.job.model_name,
                effective_batch_size=run.job.spec["effective_batch_size"],
                accumulation_steps=run.job.plan["accumulation_steps"],
                steps=len(run.losses),
                final_loss=run.losses[-1],
                loss_noise=noise,
                noise_ratio=noise / noises[0] if noises[0] else None,
                stats=performance.of_job(session, run.job).stats,
            )
            for run, noise in zip(runs, noises, strict=True)
        ],
    )


def _job(session: Session, identifier: str) -> Job:
    if not identifier.startswith("accumulation_"):
        return transitions.get(session, identifier)
    configuration = configurations.find(session, identifier)
    newest = select(Job).where(Job.config_id == configuration.id).order_by(Job.id.desc()).limit(1)
    job = session.scalars(newest).one_or_none()
    if job is None:
        raise Conflict(f"No job was made with {identifier} yet.")
    return job


def _run(session: Session, job: Job) -> _Run:
    rows = session.execute(
        select(StepMetric.samples, StepMetric.loss, StepMetric.loss_ema)
        .where(StepMetric.job_id == job.id)
        .order_by(StepMetric.step)
    ).all()
    if len(rows) < 2:
        raise Conflict(f"Job {job.id} has not made two steps yet: there is nothing to compare.")
    return _Run(
        job,
        list(accumulate(row.samples for row in rows)),
        [row.loss for row in rows],
        [row.loss_ema for row in rows],
    )


def _noise(losses: Sequence[float]) -> float:
    """The variance of window losses around their trend: half the mean squared difference of neighbours
    (von Neumann 1941), which a slow trend hardly affects."""
    return sum((after - before) ** 2 for before, after in pairwise(losses)) / (2 * (len(losses) - 1))


def _interpolate(grid: Sequence[float], x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Interpolates y(x) linearly at the points of an ascending grid that lies within x."""
    found, right = [], 1
    for point in grid:
        while right < len(x) - 1 and x[right] < point:
            right += 1
        left = right - 1
        share = (point - x[left]) / (x[right] - x[left])
        found.append(y[left] + min(1.0, max(0.0, share)) * (y[right] - y[left]))
    return found
