"""What jobs measured, in the database, and the errors, margins, estimates and rates derived from it."""

from statistics import fmean

import pytest
from sqlalchemy import select

from app.contract.reports import MeasuredSize, Tuning
from app.contract.spec import Spec
from app.memory_profiles import measurements, profiles
from app.observability.prometheus import Exposition
from app.planning.devices import GIB, Device
from app.planning.recipes import recipe_of
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Job, Measurement, StepMetric
from tests.harness.log_lines import line
from tests.harness.submissions import submitted

EACH_A_TENTH_MORE = fmean(0.1 / (2 + n / 10) for n in range(5))
CPU = Device("cpu", "CPU", 8 * GIB, "cpu")


def measure(database: Database, peak_gb: float, tokens: int = 128) -> str:
    """A job of three steps that measured this peak memory."""
    job_id = submitted(database)
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        for step in (1, 2, 3):
            measured = {"attempt": job.attempt, "peak_gb": peak_gb, "largest_tokens": tokens}
            session.add(StepMetric(job_id=job_id, **{**line(step).model_dump(), **measured}))
        session.flush()
        note(session, job)
    return job_id


def note(session: Session, job: Job) -> None:
    about = profiles.measured_job(session, job, Spec.model_validate(job.spec), CPU)
    measurements.note_run(session, about)


def swept(database: Database, job_id: str) -> None:
    tried = tuple(
        MeasuredSize(
            token_budget=tokens, micro_batches=2048 // tokens, largest_tokens=tokens, samples_per_second=1.0,
            tokens_per_second=rate, peak_bytes=2 * GIB + tokens * 2**20,
        )
        for tokens, rate in ((1024, 5000.0), (512, 4990.0), (256, 3000.0))
    )  # fmt: skip
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        about = profiles.measured_job(session, job, Spec.model_validate(job.spec), CPU)
        measurements.record_tuning(session, about, Tuning(token_budget=512, samples=30, tried=tried))


def test_measurements_yield_prediction_errors_and_a_safety_margin(database: Database) -> None:
    with database.reading() as session:
        assert measurements.margin(session, "cpu") is None
    for number in range(6):
        measure(database, 2.0 + number / 10)
    with database.reading() as session:
        rows = session.scalars(select(Measurement).order_by(Measurement.created_at)).all()
        assert [row.measured_bytes for row in rows] == [int((2 + n / 10) * GIB) for n in range(6)]
        assert [row.source for row in rows] == ["formula"] + 5 * ["measured"]
        assert measurements.mean_error(session, "formula", "cpu") is not None
        assert measurements.mean_error(session, "formula", "cuda") is None
        assert measurements.mean_error(session, "measured", "cpu") == pytest.approx(
            EACH_A_TENTH_MORE, abs=1e-4
        )
        assert 0.03 <= (measurements.margin(session, "cpu") or 0) <= 0.3


def test_measured_peaks_are_used_for_the_next_estimate(database: Database) -> None:
    job_id = measure(database, 2.0)
    with database.reading() as session:
        spec = Spec.model_validate(session.get_one(Job, job_id).spec)
        here = profiles.estimates(session, spec.model.architecture, "CPU")
        elsewhere = profiles.estimates(session, spec.model.architecture, "NVIDIA L4")
        recipe, rows = recipe_of(spec, CPU), 128 / spec.data.max_length
        estimate = here(recipe, spec.data.max_length)
        assert estimate.source == "measured"
        assert estimate.memory(rows).peak_process_bytes == pytest.approx(2 * GIB, abs=2)
        assert elsewhere(recipe, spec.data.max_length).source == "formula"
        assert here(recipe, spec.data.max_length // 2).source == "formula"


def test_recording_a_measurement_twice_keeps_the_first_prediction(database: Database) -> None:
    job_id = measure(database, 2.0)
    with database.writing() as session:
        note(session, session.get_one(Job, job_id))
    with database.reading() as session:
        (row,) = session.scalars(select(Measurement)).all()
        assert row.source == "formula"
        assert row.predicted_bytes != row.measured_bytes


def test_a_sweep_determines_the_smallest_sufficient_micro_batch(database: Database) -> None:
    job_id = measure(database, 2.0)
    with database.reading() as session:
        spec = Spec.model_validate(session.get_one(Job, job_id).spec)
        recipe = recipe_of(spec, CPU)
        throughput = profiles.throughput(session, spec.model.architecture, "CPU")
        alone = throughput(recipe, spec.data.max_length)
        assert alone is not None
        assert len(alone.points) == 1  # what the job itself did
    swept(database, job_id)
    with database.reading() as session:
        found = profiles.throughput(session, spec.model.architecture, "CPU")(recipe, spec.data.max_length)
        assert found is not None
        assert found.points == ((256, 3000.0), (512, 4990.0), (1024, 5000.0))
        assert found.useful(10**6) == 512
        estimate = profiles.estimates(session, spec.model.architecture, "CPU")(recipe, spec.data.max_length)
        peak = estimate.memory(512 / spec.data.max_length).peak_process_bytes
        assert peak == pytest.approx(2 * GIB + 512 * 2**20, abs=2)


def test_a_size_whose_memory_was_not_measured_counts_for_speed_alone(database: Database) -> None:
    """Sizes that are tried while training: the process's peak is that of the largest one."""
    tried = tuple(
        MeasuredSize(
            token_budget=tokens, micro_batches=4, largest_tokens=600, samples_per_second=rate / 64,
            tokens_per_second=rate, peak_bytes=None,
        )
        for tokens, rate in ((512, 900.0), (256, 950.0), (128, 700.0))
    )  # fmt: skip
    job_id = submitted(database)
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        about = profiles.measured_job(session, job, Spec.model_validate(job.spec), CPU)
        measurements.record_tuning(session, about, Tuning(token_budget=256, samples=30, tried=tried[:1]))
        measurements.record_tuning(session, about, Tuning(token_budget=256, samples=30, tried=tried))
    with database.reading() as session:
        assert measurements.points(session, about.architecture, about.key, CPU.name) == []
        speeds = measurements.throughput(session, about.key, CPU.name)
        assert speeds is not None
        assert speeds.points == ((256, 950.0), (512, 900.0))  # not what is smaller than the chosen size
        assert measurements.mean_error(session, about.estimate.source, "cpu") is None
    assert "accrue_memory_prediction_error{" not in Exposition(database).text().decode()


def test_on_a_gpu_the_margin_follows_from_what_the_allocator_held(database: Database) -> None:
    gpu = Device(0, "NVIDIA L4", 24 * GIB, "cuda", expandable_segments=True)
    for number in range(6):
        job_id = submitted(database)
        with database.writing() as session:
            job = session.get_one(Job, job_id)
            about = profiles.measured_job(session, job, Spec.model_validate(job.spec), gpu)
            allocated, held = about.predicted(128, accumulating=True)
            assert held is not None
            # Allocated as predicted; held: a fifth more than predicted.
            measured = {
                "attempt": job.attempt, "peak_gb": allocated / GIB, "reserved_gb": 1.2 * held / GIB,
                "largest_tokens": 128, "gradient_accumulation_steps": 4,
            }  # fmt: skip
            for step in (1, 2, 3):
                session.add(StepMetric(job_id=job_id, **{**line(step).model_dump(), **measured}))
            session.flush()
            if number == 5:
                assert measurements.margin(session, "cuda") == pytest.approx(0.2, abs=0.01)
            measurements.note_run(session, about)
    with database.reading() as session:
        assert measurements.mean_error(session, "formula", "cuda") == pytest.approx(0.0, abs=0.01)
        [row] = session.scalars(select(Measurement).order_by(Measurement.created_at).limit(1)).all()
        assert (row.reserved_bytes or 0) == pytest.approx(1.2 * (row.predicted_reserved_bytes or 0), rel=1e-6)


def test_measurements_of_older_trainers_give_no_margin_on_a_gpu(database: Database) -> None:
    gpu = Device(0, "NVIDIA L4", 24 * GIB, "cuda")
    for _ in range(6):
        job_id = submitted(database)
        with database.writing() as session:
            job = session.get_one(Job, job_id)
            measured = {"attempt": job.attempt, "peak_gb": 2.0, "reserved_gb": None, "largest_tokens": 128}
            for step in (1, 2, 3):
                session.add(StepMetric(job_id=job_id, **{**line(step).model_dump(), **measured}))
            session.flush()
            about = profiles.measured_job(session, job, Spec.model_validate(job.spec), gpu)
            measurements.note_run(session, about)
    with database.reading() as session:
        assert measurements.margin(session, "cuda") is None
