"""Comparisons of jobs: noise as defined, and losses at samples that all jobs have seen."""

import random

import pytest

from app.errors import Conflict
from app.results.charts import comparison
from app.results.comparison import compare
from app.storage.database import Database
from app.storage.tables import Job, StepMetric
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
    assert compared.averaged_samples == 32  # one window of the coarser job
    assert compared.loss[coarse] == [1.0, 2.0, 3.0, 4.0]
    assert compared.loss[fine] == [1.5, 3.5, 5.5, 7.5]  # of four windows, up to the same samples
    assert comparison(compared).startswith(b"\x89PNG")


@pytest.mark.parametrize("points", [2, 7, 40])
def test_the_batch_size_does_not_change_the_loss_of_the_same_samples(database: Database, points: int) -> None:
    """Twelve windows of a large batch, and the same samples in small batches, whose losses fall quickly."""
    small = [9.0 * 0.98**n for n in range(192)]
    large = [sum(small[16 * n : 16 * n + 16]) / 16 for n in range(12)]
    ids = [with_losses(database, small, samples=4), with_losses(database, large, samples=64)]
    with database.reading() as session:
        compared = compare(session, ids, points)
    first, second = (compared.loss[job_id] for job_id in ids)
    assert compared.samples_seen[-1] == 768
    assert compared.averaged_samples == 192
    assert first[-1] == pytest.approx(sum(small[-48:]) / 48)
    assert second[-1] == pytest.approx(first[-1])
    assert second[0] == pytest.approx(first[0])


def test_a_loss_without_bounds_leaves_the_others_as_they_are(database: Database) -> None:
    ids = [with_losses(database, [1.0, huge, *[2.0] * 40], samples=8) for huge in (1e30, 3.0)]
    with database.reading() as session:
        compared = compare(session, ids, 5)
    assert compared.loss[ids[0]][-1] == pytest.approx(2.0, rel=1e-9)
    assert compared.loss[ids[1]][-1] == pytest.approx(2.0)


def test_losses_that_measure_different_things_are_marked(database: Database) -> None:
    one, same = (with_losses(database, [3.0, 2.0], samples=8) for _ in range(2))
    other = with_losses(database, [3.0, 2.0], samples=8)
    with database.writing() as session:
        job = session.get_one(Job, other)
        job.spec = {**job.spec, "objective": {"name": "dpo"}}
        again = session.get_one(Job, same)
        again.spec = {**again.spec, "data": {**again.spec["data"], "file_id": "file-2"}}  # of equal content
    with database.reading() as session:
        assert compare(session, [one, same], 5).why_not_comparable is None
        assert "objectives vary" in str(compare(session, [one, other], 5).why_not_comparable)


def test_losses_of_an_objective_with_other_arguments_are_marked(database: Database) -> None:
    """The losses of KTO are multiplied by its weights, for example."""
    jobs = [with_losses(database, [3.0, 2.0], samples=8) for _ in range(2)]
    with database.writing() as session:
        for job_id, weight in zip(jobs, (0.1, 10.0), strict=True):
            job = session.get_one(Job, job_id)
            job.spec = {**job.spec, "objective": {"name": "kto", "undesirable_weight": weight}}
    with database.reading() as session:
        assert "objectives vary" in str(compare(session, jobs, 5).why_not_comparable)


def test_jobs_that_cannot_be_compared_are_rejected(database: Database) -> None:
    long, none = with_losses(database, [1.0, 2.0], samples=8), submitted(database)
    late = with_losses(database, [1.0, 2.0], samples=1000)
    with database.reading() as session:
        with pytest.raises(Conflict, match="two steps"):
            compare(session, [long, none], 10)
        with pytest.raises(Conflict, match="as many samples"):
            compare(session, [long, late], 10)
