"""Comparisons of jobs: noise as defined, and losses at samples that all jobs have seen."""

import random

import pytest

from app.errors import Conflict
from app.results.charts import comparison
from app.results.comparison import compare
from app.storage.database import Database
from app.storage.tables import StepMetric
from tests.harness.log_lines import line
from tests.harness.submissions import submitted


def with_losses(database: Database, losses: list[float], samples: int) -> str:
    job_id = submitted(database)
    with database.writing() as session:
        for step, loss in enumerate(losses, 1):
            values = line(step, loss=loss).model_dump() | {"samples": samples}
            session.add(StepMetric(job_id=job_id, **values))
    return job_id


def noisy(deviation: float, count: int, seed: int) -> list[float]:
    """Losses that fall from 5 to 3, with normal noise."""
    draw = random.Random(seed)
    return [5 - 2 * n / count + draw.gauss(0, deviation) for n in range(count)]


def test_loss_noise_is_separated_from_the_trend(database: Database) -> None:
    a = with_losses(database, noisy(0.4, 4000, 1), samples=8)
    b = with_losses(database, noisy(0.2, 4000, 2), samples=8)
    with database.reading() as session:
        first, second = compare(session, [a, b], 10).jobs
    assert first.loss_noise == pytest.approx(0.4**2, rel=0.1)
    assert (first.noise_ratio, second.noise_ratio) == (1.0, pytest.approx(0.25, rel=0.15))


def test_losses_are_compared_at_the_same_samples(database: Database) -> None:
    coarse = with_losses(database, [1.0, 3.0, 5.0], samples=32)  # at 32, 64, 96 samples seen
    fine = with_losses(database, [float(n) for n in range(10)], samples=8)  # at 8, 16, … 80
    with database.reading() as session:
        compared = compare(session, [coarse, fine], 4)
    assert compared.samples_seen == [32, 48, 64, 80]
    assert compared.loss[coarse] == [1.0, 2.0, 3.0, 4.0]
    assert compared.loss[fine] == [3.0, 5.0, 7.0, 9.0]
    assert comparison(compared).startswith(b"\x89PNG")


def test_jobs_that_cannot_be_compared_are_rejected(database: Database) -> None:
    long, none = with_losses(database, [1.0, 2.0], samples=8), submitted(database)
    late = with_losses(database, [1.0, 2.0], samples=1000)
    with database.reading() as session:
        with pytest.raises(Conflict, match="two steps"):
            compare(session, [long, none], 10)
        with pytest.raises(Conflict, match="as many samples"):
            compare(session, [long, late], 10)
