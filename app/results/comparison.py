"""Several jobs side by side: their losses at the same number of samples seen, and how noisy each is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from sqlalchemy import case, func, or_, select

from app.errors import Conflict
from app.jobs import configurations, transitions
from app.results.comparability import why_not_comparable
from app.results.mean_losses import averaged_samples, summed_loss
from app.results.schemas import ComparedJob, Comparison
from app.statistics import performance
from app.storage.session import Session
from app.storage.tables import Job, StepMetric

MAX_POINTS = 500


_ROWS_PER_POINT, _FEW_ROWS = 4, 2000
"""A long job's steps are read at most this many times as densely as they are shown; of up to 2,000 steps, all
are read."""

_MAX_DIFFERENCE = 1e150
"""A larger change between neighbouring losses counts as 0 in the noise: its square would overflow."""


@dataclass(frozen=True)
class _Run:
    job: Job
    steps: int
    final_loss: float
    noise: float
    samples: list[int]
    """Seen after each of the steps that were read: the first, the last, and evenly spread ones between."""
    sums: list[float]
    """The losses of all samples seen, added up."""

    def means(self, grid: Sequence[float], samples: int) -> list[float]:
        """The mean loss of the last samples, at each point of the grid."""
        begins = [max(0.0, point - samples) for point in grid]
        x, y = [0, *self.samples], [0.0, *self.sums]
        pairs = zip(_interpolate(begins, x, y), _interpolate(grid, x, y), begins, grid, strict=True)
        return [(until - before) / max(1.0, end - begin) for before, until, begin, end in pairs]


def compare(session: Session, ids: Sequence[str], points: int) -> Comparison:
    """Aligns the losses of several jobs by the number of samples seen.

    Args:
        ids: ids of jobs or of configurations; a configuration stands for its newest job.
        points: the number of points in each aligned series.

    Raises:
        NotFound: a job does not exist.
        Conflict: only one job is named, a job has fewer than two steps, or the jobs have no range of samples
            in common.
    """
    jobs = {job.id: job for job in (_job(session, each) for each in dict.fromkeys(ids))}
    if len(jobs) < 2:
        raise Conflict("All of these ids mean the same job: name another one to compare it with.")
    runs = [_run(session, job, max(_FEW_ROWS, points * _ROWS_PER_POINT)) for job in jobs.values()]
    first, last = max(run.samples[0] for run in runs), min(run.samples[-1] for run in runs)
    if first > last:
        raise Conflict(
            "These jobs cannot be compared: one ended before it had trained on as many samples as the first "
            "step of another."
        )
    grid = [first + (last - first) * number / (points - 1) for number in range(points)]
    averaged = averaged_samples([first, *(run.job.spec["effective_batch_size"] for run in runs)], last)
    return Comparison(
        samples_seen=grid,
        loss={run.job.id: run.means(grid, averaged) for run in runs},
        averaged_samples=averaged,
        why_not_comparable=why_not_comparable(list(jobs.values())),
        jobs=[
            ComparedJob(
                training_id=run.job.id,
                model_name=run.job.model_name,
                effective_batch_size=run.job.spec["effective_batch_size"],
                accumulation_steps=run.job.plan["accumulation_steps"],
                steps=run.steps,
                final_loss=run.final_loss,
                loss_noise=run.noise,
                noise_ratio=run.noise / runs[0].noise if runs[0].noise else None,
                stats=performance.of_job(session, run.job).stats,
            )
            for run in runs
        ],
    )


def _job(session: Session, identifier: str) -> Job:
    if not identifier.startswith("accumulation_"):
        return transitions.get(session, identifier)
    configuration = configurations.find(session, identifier)
    newest = select(Job).where(Job.config_id == configuration.id).order_by(Job.id.desc()).limit(1)
    job = session.scalars(newest).one_or_none()
    if job is None:
        raise Conflict(f"No job uses configuration {identifier} yet: submit one, or give a job's id.")
    return job


def _run(session: Session, job: Job, most_rows: int) -> _Run:
    """A job's losses, of which the database computes the noise and picks evenly spread steps.

    Its noise is the variance of window losses around their trend: half the mean squared difference of
    neighbours (von Neumann 1941), which a slow trend hardly affects.
    """
    steps = (
        select(
            func.row_number().over(order_by=StepMetric.step).label("number"),
            func.sum(StepMetric.samples).over(order_by=StepMetric.step).label("samples"),
            (StepMetric.loss - func.lag(StepMetric.loss).over(order_by=StepMetric.step)).label("change"),
            StepMetric.loss.label("loss"),
            func.sum(summed_loss()).over(order_by=StepMetric.step).label("sums"),
        )
        .where(StepMetric.job_id == job.id)
        .subquery()
    )
    change = steps.c.change
    squared = case((func.abs(change) < _MAX_DIFFERENCE, change * change), else_=0.0)
    count, squares = session.execute(select(func.count(), func.sum(squared)).select_from(steps)).one()
    if count < 2:
        raise Conflict(f"Job {job.id} has not made two steps yet: there is nothing to compare.")
    number = steps.c.number
    picked = or_(number % ceil(count / most_rows) == 0, number == 1, number == count)
    rows = session.execute(
        select(steps.c.samples, steps.c.loss, steps.c.sums).where(picked).order_by(number)
    ).all()
    return _Run(
        job,
        steps=count,
        final_loss=rows[-1].loss,
        noise=float(squares) / (2 * (count - 1)),
        samples=[int(row.samples) for row in rows],
        sums=[float(row.sums) for row in rows],
    )


def _interpolate(grid: Sequence[float], x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Interpolates y(x) linearly at the points of an ascending grid that lies within x."""
    found, right = [], 1
    for point in grid:
        while right < len(x) - 1 and x[right] < point:
            right += 1
        left = right - 1
        width = x[right] - x[left]
        share = (point - x[left]) / width if width else 0.0
        found.append(y[left] + min(1.0, max(0.0, share)) * (y[right] - y[left]))
    return found
