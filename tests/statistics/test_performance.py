"""Speeds predicted from finished jobs, and totals over all jobs."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import delete, insert, update

from app.contract.reports import LogLine
from app.contract.spec import MethodSpec
from app.jobs import transitions
from app.planning.changes import DEFAULT_LORA
from app.planning.devices import GIB, Device
from app.results import series as module
from app.results.series import each_step, last_step, series
from app.statistics import performance, totals
from app.statistics.schemas import GroupWord
from app.storage.database import Database
from app.storage.tables import Attempt, Job, StepMetric
from tests.harness.log_lines import line
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted

CPU = Device("cpu", "CPU", 8 * GIB, "cpu")


def finished(database: Database, device: str, steps: int) -> str:
    """A finished job with this many steps, each of 8 samples and 90 tokens in 0.6 seconds."""
    job_id = submitted(database)
    with database.writing() as session:
        for step in range(1, steps + 1):
            session.add(StepMetric(job_id=job_id, **line(step).model_dump()))
        job = session.get_one(Job, job_id)
        job.status, job.device = "succeeded", device
    return job_id


def test_speed_is_taken_from_the_newest_comparable_finished_job(database: Database) -> None:
    submitted(database)
    spec = make_spec()
    with database.reading() as session:
        assert performance.speed(session, spec, CPU) is None
    finished(database, "cpu", 20)
    newest = finished(database, "cpu", 11)
    finished(database, "cpu", 10)  # its first step aside, too few to be a measurement
    finished(database, "cuda:0", 20)
    with database.reading() as session:
        speed = performance.speed(session, spec, CPU)
        assert speed is not None
        assert speed.job_id == newest
        assert speed.samples_per_second == pytest.approx(8 / 0.6)
        assert speed.tokens_per_sample == pytest.approx(90 / 8)
        for other in (
            make_spec(model=spec.model.model_copy(update={"name": "another"})),
            make_spec(gradient_checkpointing=True),
            make_spec(method=MethodSpec(name="lora", lora=DEFAULT_LORA)),
            make_spec(data=spec.data.model_copy(update={"max_length": 1024})),
        ):
            assert performance.speed(session, other, CPU) is None
        assert performance.speed(session, spec, replace(CPU, name="another processor")) is None


def test_totals_equal_the_sums_of_steps_for_running_and_ended_jobs(database: Database) -> None:
    ended = finished(database, "cpu", steps=5)
    running = finished(database, "cpu", steps=3)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == running).values(status="running"))
        totals.store_totals(session, ended)
        totals.store_totals(session, running)
        session.add(StepMetric(job_id=running, **line(4).model_dump()))
    with database.reading() as session:
        counted = totals.count(session.connection(), None)
    assert (counted.jobs, counted.steps, counted.samples) == (2, 9, 72)
    assert counted.by_status == {"succeeded": 1, "running": 1}
    assert counted.final_loss == 1.0
    assert counted.target_tokens_per_second == pytest.approx(80 / 0.6)
    assert counted.samples_per_second == pytest.approx(8 / 0.6)
    assert counted.by_day == {datetime.now(UTC).date().isoformat(): 2}
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == running).values(status="failed"))
        totals.store_totals(session, running)
        assert totals.count(session.connection(), None).steps == 9


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("day", ["2026-11-27", "2026-11-28"]),
        ("user", ["7", "anna", None]),
        ("model", ["other", "accrue/tiny-gpt2"]),
        ("device", ["gpu", "cpu", None]),
    ],
)
def test_totals_by_group_add_up_to_those_of_all_jobs(
    database: Database, by: GroupWord, names: list[str | None]
) -> None:
    running, failed, waiting = (finished(database, "cpu", steps=steps) for steps in (3, 5, 1))
    begin = datetime(2026, 11, 27, 23, tzinfo=UTC).timestamp()
    one = {"status": "running", "user_id": 7, "model_name": "other", "device": "gpu", "created_at": begin}
    two = {"status": "failed", "user_id": "anna", "device": "cpu", "created_at": begin + 3600}
    three = {"status": "queued", "device": None, "created_at": begin + 7200}
    with database.writing() as session:
        for job_id, values, hours in ((running, one, 3), (failed, two, 1), (waiting, three, 0)):
            session.execute(update(Job).where(Job.id == job_id).values(**values))
            session.add(
                Attempt(
                    job_id=job_id, attempt=1, worker_id="w", claimed_at=begin, ended_at=begin + hours * 3600
                )
            )
        session.execute(delete(StepMetric).where(StepMetric.job_id == waiting))
        session.flush()
        totals.store_totals(session, running)
        totals.store_totals(session, failed)
        session.add(StepMetric(job_id=running, **line(4).model_dump()))
    with database.reading() as session:
        whole = totals.count(session.connection(), None, by=by)
        assert totals.count(session.connection(), None).groups is None
    assert whole.groups is not None
    assert [group.group for group in whole.groups] == names
    for name in ("jobs", "steps", "samples", "tokens", "skipped", "device_hours"):
        assert sum(getattr(group, name) for group in whole.groups) == getattr(whole, name), name
    of_running = next(group for group in whole.groups if group.group in ("2026-11-27", "7", "other", "gpu"))
    assert (of_running.steps, of_running.device_hours, of_running.success_rate) == (4, 3.0, None)
    assert of_running.by_status == {"running": 1}
    assert of_running.target_tokens_per_second == pytest.approx(whole.target_tokens_per_second)
    assert {group.success_rate for group in whole.groups} == {None, 0.0}


def test_a_series_has_the_requested_points_including_first_and_last(database: Database) -> None:
    job_id = finished(database, "cpu", steps=10)
    told = {"micro_losses": [1.0, 2.5], "gradient_norms": {"layer": 0.5}}
    with database.writing() as session:
        session.execute(update(StepMetric).where(StepMetric.step == 10).values(**told))
    for opened in (database.reading, database.connecting):
        with opened() as where:
            chosen = series(where, job_id, 0, 4)
            assert [each["step"] for each in chosen] == [1, 4, 7, 10]
            assert {name: chosen[-1][name] for name in told} == told
            assert LogLine.model_validate(chosen[0]) == line(1)
            assert [each["step"] for each in series(where, job_id, 8, None)] == [8, 9, 10]
            assert len(series(where, job_id, 0, 10)) == 10
            assert series(where, "ftjob-none", 0, 4) == []
            assert (last_step(where, job_id), last_step(where, "ftjob-none")) == (10, 0)


def test_a_long_series_is_read_page_by_page(database: Database) -> None:
    steps = 2 * module.PAGE + 1
    job_id = submitted(database)
    with database.writing() as session:
        rows = [{"job_id": job_id, **line(step).model_dump()} for step in range(1, steps + 1)]
        session.execute(insert(StepMetric), rows)
    with database.reading() as session:
        assert [each["step"] for each in each_step(session, job_id)] == list(range(1, steps + 1))


def test_totals_count_only_jobs_that_match_the_filters(database: Database) -> None:
    chosen, other = finished(database, "cpu", steps=5), finished(database, "cpu", steps=3)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == other).values(model_name="other", user_id=7))
        for number, job_id in enumerate((chosen, other)):
            session.add(
                Attempt(
                    job_id=job_id, attempt=1, worker_id="w", claimed_at=0.0, ended_at=1800.0 * (number + 1)
                )
            )
            session.flush()
            totals.store_totals(session, job_id)
    with database.reading() as session:
        connection = session.connection()
        own = totals.count(connection, None, [Job.model_name != "other"])
        assert (own.jobs, own.steps, own.device_hours) == (1, 5, 0.5)
        assert own.by_model == {"accrue/tiny-gpt2": 1}
        own = totals.count(connection, None, [Job.model_name == "other", Job.status == "succeeded"])
        assert (own.jobs, own.steps, own.by_user, own.device_hours) == (1, 3, {"7": 1}, 1.0)
        assert totals.count(connection, None, [Job.status == "failed"]).target_tokens_per_second is None
        assert totals.count(connection, None).device_hours == 1.5


def test_accumulating_is_compared_with_single_micro_batches_of_the_same_size(database: Database) -> None:
    several, single = submitted(database), submitted(database)
    with database.writing() as session:
        for job_id, steps, seconds in ((several, 4, 0.88), (single, 1, 0.2)):
            changed = {
                "gradient_accumulation_steps": steps, "forward_backward_seconds": seconds,
                "padded_tokens": 100 * steps, "largest_tokens": 100, "synchronise_seconds": 0.01,
            }  # fmt: skip
            for step in (1, 2):
                own = line(step).model_copy(update=changed)
                session.add(StepMetric(job_id=job_id, **own.model_dump()))
            job = session.get_one(Job, job_id)
            job.plan = {**job.plan, "accumulation_steps": steps}
    with database.reading() as session:
        both = [transitions.get(session, several), transitions.get(session, single)]
        first, second = performance.performances(session, both)
        assert performance.performance(session, both[0]).accumulation_overhead is None
    assert first.accumulation_overhead == pytest.approx(0.1)
    assert second.accumulation_overhead is None
    assert first.seconds["synchronisation"] == pytest.approx(0.02)
    [cost] = first.by_accumulation_steps
    assert (cost.accumulation_steps, cost.windows) == (4, 2)
    assert cost.seconds_per_micro_batch == pytest.approx(0.22)
    assert cost.seconds_per_window == pytest.approx(0.1 + 0.88 + 0.3 + 0.01)
