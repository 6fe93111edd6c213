"""What a dry run would cost, and how a job was split into micro-batches."""

import pytest
from sqlalchemy import update

from app.contract.spec import Strategy
from app.jobs.lifecycle import Submission
from app.jobs.responses import dry_run_answer, job_answer
from app.jobs.waiting import WaitingReasons
from app.statistics.performance import Speed
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.specs import cpu_plan, make_spec
from tests.harness.submissions import submitted


def submission(device: str) -> Submission:
    spec = make_spec()
    plan = cpu_plan(spec).model_copy(update={"device": device, "predicted_duration_seconds": 7200.0})
    return Submission(spec, plan, {}, {}, None, None, {}, 0, paused=False)


@pytest.mark.parametrize(
    ("device", "cost", "hours", "told"),
    [("cuda", 2.5, 2.0, 5.0), ("cuda", None, 2.0, None), ("cpu", 2.5, None, None)],
)
def test_gpu_hours_and_cost_are_reported_only_for_gpus(
    device: str, cost: float | None, hours: float | None, told: float | None
) -> None:
    answer = dry_run_answer(submission(device), Speed("ftjob-1", 1.0, 10.0, True), 50, cost)
    assert (answer.gpu_hours, answer.gpu_cost) == (hours, told)


RANK = {
    "rank": 0, "total_micro_batches": 30, "total_tokens": 100, "total_seconds": 1.0,
    "total_idle_seconds": 0.0, "peak_gb": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "ranks", "steps", "size"), [(None, 1, 6, 6), (None, 2, 3, 6), ("independent", 2, 3, 11)]
)
def test_the_split_of_an_ended_job_is_that_of_each_device(
    database: Database, strategy: Strategy | None, ranks: int, steps: int, size: int
) -> None:
    """32 samples per step; ten steps took 60 micro-batches."""
    job_id = submitted(database, make_spec(effective_batch_size=32, strategy=strategy))
    progress = {"step": 10, "micro_step": 60, "ranks": [RANK] * ranks if ranks > 1 else None}
    with database.writing() as session:
        config = {"use_gradient_accumulation": True}
        session.execute(update(Job).values(status="cancelled", progress=progress, config=config))
    with database.reading() as session:
        answer = job_answer(WaitingReasons(session), session.get_one(Job, job_id))
    assert (answer.accumulation_steps, answer.actual_batch_size_per_gpu) == (steps, size)


@pytest.mark.parametrize(("status", "eta"), [("running", 5.0), ("paused", None), ("succeeded", None)])
def test_only_a_running_job_has_an_estimated_end(database: Database, status: str, eta: float | None) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        progress, config = {"step": 1, "eta_seconds": 5.0}, {"use_gradient_accumulation": True}
        session.execute(update(Job).values(status=status, progress=progress, config=config))
    with database.reading() as session:
        answer = job_answer(WaitingReasons(session), session.get_one(Job, job_id))
    assert answer.progress.eta_seconds == eta
