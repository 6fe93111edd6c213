"""Log lines become rows exactly once, also if they are read again, broken or rolled back."""

from pathlib import Path

import pytest
from sqlalchemy import select

from app.contract.reports import RankLine, WindowProgress
from app.jobs import queue, transitions
from app.jobs.responses import job_answer
from app.jobs.transitions import Fence, LostJob
from app.jobs.waiting import WaitingReasons
from app.results.series import evaluations, series
from app.statistics import totals
from app.statistics.performance import of_job
from app.storage.database import Database
from app.storage.tables import Job, JobEvent, StepMetric
from tests.harness.claims import claim, expire, in_transaction
from tests.harness.ingestion import read, read_once
from tests.harness.log_lines import line
from tests.harness.runs import create_run
from tests.harness.submissions import submitted
from workers.ingest import Position, forget_steps_after, ingest
from workers.reporter import Reporter
from workers.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "run")


@pytest.fixture
def fence(database: Database) -> Fence:
    submitted(database)
    fence = claim(database)
    assert fence is not None
    return fence


def stored(database: Database) -> list[tuple[int, int, float]]:
    with database.reading() as session:
        rows = session.execute(
            select(StepMetric.step, StepMetric.attempt, StepMetric.loss).order_by(StepMetric.step)
        )
        return [tuple(row) for row in rows]  # type: ignore[misc]


def test_steps_events_and_progress(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        reporter.event("training", "starts", steps_total=10)
        reporter.step(line(1))
        reporter.step(line(2, loss=0.5))
        reporter.event("checkpoint", "c", step=2)
    position = read(database, run, fence)
    assert (position.steps_total, position.checkpoint_step) == (10, 2)
    assert read(database, run, fence, position) == position
    assert stored(database) == [(1, 1, 1.0), (2, 1, 0.5)]
    with database.reading() as session:
        job = session.get_one(Job, fence.job_id)
    assert (job.progress["step"], job.progress["steps_total"], job.progress["samples_seen"]) == (2, 10, 16)
    assert job.progress["eta_seconds"] == pytest.approx(8 * 0.6)
    assert job.checkpoint_step == 2


def test_reading_again_from_the_start_stores_no_duplicates(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    with Reporter(run, 1) as reporter:
        reporter.event("training", "starts", steps_total=10)
        reporter.step(line(1))
    read(database, run, fence)
    read(database, run, fence)
    assert stored(database) == [(1, 1, 1.0)]
    with database.reading() as session:
        assert len(session.scalars(select(JobEvent).where(JobEvent.type == "training")).all()) == 1


def test_the_later_attempt_s_step_is_kept(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        for each in (line(1), line(2), line(2, attempt=2, loss=0.7), line(1, attempt=2, loss=0.9)):
            reporter.step(each)
    read(database, run, fence)
    with Reporter(run, 1) as reporter:
        reporter.step(line(1, attempt=1, loss=0.1))
    read(database, run, fence)
    assert stored(database) == [(1, 2, 0.9), (2, 2, 0.7)]


def test_steps_that_the_model_was_not_trained_with_are_forgotten(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    """An earlier attempt made them, and the last one was stopped before them."""
    with Reporter(run, 1) as reporter:
        for step in range(1, 7):
            reporter.step(line(step, loss=float(step)))
            reporter.event("evaluation", "e", step=step, loss=float(step))
    position = read(database, run, fence)
    with database.writing() as session:
        forget_steps_after(session, fence, position, 4)
        queue.succeed(session, fence, {"steps": 4})
    assert [step for step, _, _ in stored(database)] == [1, 2, 3, 4]
    with database.reading() as session:
        job = session.get_one(Job, fence.job_id)
        assert (job.progress["step"], job.progress["loss"], job.progress["samples_seen"]) == (4, 4.0, 32)
        assert of_job(session, job).stats.final_loss == 4.0
        assert [*evaluations(session, fence.job_id)] == [1, 2, 3, 4]


def test_an_incomplete_line_is_read_later_and_a_broken_one_is_skipped(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    whole = line(1).model_dump_json().encode() + b"\n"
    run.metrics.write_bytes(b'{"broken\n' + whole[:30])
    position = read(database, run, fence)
    assert stored(database) == []
    with run.metrics.open("ab") as file:
        file.write(whole[30:])
    read(database, run, fence, position)
    assert stored(database) == [(1, 1, 1.0)]


def test_a_worker_that_lost_the_job_stores_nothing(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    expire(database, fence.job_id)
    in_transaction(database, queue.reclaim_expired)
    with Reporter(run, 1) as reporter:
        reporter.step(line(1))
    with pytest.raises(LostJob):
        read(database, run, fence)
    assert stored(database) == []


def test_what_was_rolled_back_is_read_again(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        reporter.step(line(1))

    def fail_after_reading() -> None:
        with database.writing() as session:
            ingest(session, run, fence, Position())
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail_after_reading()
    assert stored(database) == []
    read(database, run, fence)
    assert stored(database) == [(1, 1, 1.0)]


def test_an_event_longer_than_one_read_is_stored(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        reporter.event("skipped", "x", samples=list(range(100_000)))
        reporter.event("training", "starts", steps_total=10)
    assert read(database, run, fence).steps_total == 10


def test_windows_that_made_no_step_count_without_a_step_after_them(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    with Reporter(run, 1) as reporter:
        reporter.step(line(1))
        reporter.event("skipped", "x", samples=[3], skipped=1)
        reporter.event("skipped", "x", samples=[5], skipped=2)
    read(database, run, fence)
    with database.reading() as session:
        job = session.get_one(Job, fence.job_id)
        assert job.progress["skipped"] == 2
        assert totals.count(session.connection(), None).skipped == 2


def test_a_long_log_is_read_in_pieces_that_are_each_committed(
    database: Database, run: RunDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers import ingest as module

    monkeypatch.setattr(module, "_READ_AT_ONCE", 2000)
    monkeypatch.setattr(module, "_SECONDS_AT_ONCE", 0.0)
    with Reporter(run, 1) as reporter:
        for step in range(1, 101):
            reporter.step(line(step))
    position, pieces = Position(), 0
    while not pieces or not position.caught_up:
        position, pieces = read_once(database, run, fence, position), pieces + 1
        assert len(stored(database)) > 0
    assert pieces > 3
    assert [step for step, *_ in stored(database)] == list(range(1, 101))
    with database.reading() as session:
        progress = transitions.get(session, fence.job_id).progress
    assert (progress["samples_seen"], progress["tokens_seen"]) == (800, 8000)


def test_repeated_steps_count_once(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        for step in range(1, 11):
            reporter.step(line(step))
    position = read(database, run, fence)
    with Reporter(run, 2) as reporter:
        for step in range(6, 8):
            reporter.step(line(step, attempt=2))
    read(database, run, fence, position)
    with Reporter(run, 2) as reporter:
        for step in range(8, 13):
            reporter.step(line(step, attempt=2))
    read(database, run, fence)
    with database.reading() as session:
        assert transitions.get(session, fence.job_id).progress["samples_seen"] == 12 * 8


def test_what_each_rank_did_is_stored_and_answered(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    ranks = tuple(
        RankLine(
            rank=rank, micro_batches=2, samples=4, tokens=50 + rank, seconds=2.0 - rank, idle_seconds=rank,
            peak_gb=1.5, total_micro_batches=20, total_tokens=600, total_seconds=30.0,
            total_idle_seconds=10.0 * rank,
        )
        for rank in (0, 1)
    )  # fmt: skip
    with Reporter(run, 1) as reporter:
        reporter.step(line(1).model_copy(update={"ranks": ranks}))
    read(database, run, fence)
    with database.reading() as session:
        assert series(session, fence.job_id, 0, None)[0]["ranks"] == [vars(rank) for rank in ranks]
        job = session.get_one(Job, fence.job_id)
        figures = of_job(session, job).stats.ranks
        job.config = {"use_gradient_accumulation": True}
        progress = job_answer(WaitingReasons(session), job).progress
    assert figures is not None
    assert progress.ranks == figures
    assert [(each.tokens, each.tokens_per_second, each.idle_share) for each in figures] == [
        (600, 20.0, 0.0),
        (600, 20.0, 0.25),
    ]


def test_progress_within_a_window_is_reported(database: Database, run: RunDirectory, fence: Fence) -> None:
    with Reporter(run, 1) as reporter:
        reporter.step(line(1))
    run.write_progress(WindowProgress(attempt=1, step=1, micro_step=5, accumulation_step=3))
    read(database, run, fence)
    with database.reading() as session:
        progress = transitions.get(session, fence.job_id).progress
    assert (progress["step"], progress["micro_step"], progress["accumulation_step"]) == (1, 5, 3)
    assert progress["within_window"]
    run.write_progress(WindowProgress(attempt=7, step=1, micro_step=9, accumulation_step=9))
    read(database, run, fence)
    with database.reading() as session:
        progress = transitions.get(session, fence.job_id).progress
    assert (progress["accumulation_step"], progress["within_window"]) == (2, False)


def test_progress_of_the_preparation_is_shown_until_the_first_step(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    with Reporter(run, 1) as reporter:
        reporter._progress_at -= 10
        reporter.preparing(300, 1000)
        reporter.preparing(400, 1000)  # within the same second
        read(database, run, fence)
        with database.reading() as session:
            progress = transitions.get(session, fence.job_id).progress
        assert (progress["prepared_samples"], progress["samples_to_prepare"]) == (300, 1000)
        reporter.step(line(1))
    read(database, run, fence)
    with database.reading() as session:
        progress = transitions.get(session, fence.job_id).progress
    assert "samples_to_prepare" not in progress


def test_text_that_cannot_be_stored_loses_no_event(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    with Reporter(run, 1) as reporter:
        reporter.event("odd", "a\x00b", told=["c\x00"])
    read(database, run, fence)
    with database.reading() as session:
        event = session.scalars(select(JobEvent).where(JobEvent.type == "odd")).one()
    assert (event.message, event.data) == ("a\ufffdb", {"told": ["c\ufffd"]})
