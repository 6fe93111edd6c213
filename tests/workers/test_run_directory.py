import multiprocessing
from pathlib import Path

import pytest

from app.contract.reports import Failure, Outcome
from tests.harness.runs import create_run, events_of
from workers.reporter import Reporter
from workers.run_directory import RunDirectory, RunDirectoryInUse

OUTCOME = Outcome(
    files=("a",), steps=1, first_loss=2.0, final_loss=1.0, trained_tokens=3, effective_batch_size=4
)


def test_an_assignment_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    assert run.assignment().plan == create_run(tmp_path / "again").assignment().plan
    assert run.path.stat().st_mode & 0o077 == 0


def test_outcome_and_failure_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    assert (run.outcome(), run.failure()) == (None, None)
    run.write_outcome(OUTCOME)
    run.write_failure(Failure(code="x", message="y", permanent=True))
    assert run.outcome() == OUTCOME
    assert run.failure() is not None


def test_a_new_attempt_removes_the_previous_failure(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    run.write_failure(Failure(code="x", message="y", permanent=False))
    create_run(tmp_path / "run", attempt=2)
    assert run.failure() is None


def hold(
    path: Path, held: "multiprocessing.synchronize.Event", go: "multiprocessing.synchronize.Event"
) -> None:  # type: ignore[name-defined]
    with RunDirectory(path).locked():
        held.set()
        go.wait(30)


def test_a_run_is_locked_by_one_trainer_and_released_at_its_death(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    context = multiprocessing.get_context("fork")
    held, go = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(run.path, held, go))
    holder.start()
    assert held.wait(30)
    with pytest.raises(RunDirectoryInUse), run.locked(wait_seconds=0.2):
        pass
    holder.kill()
    holder.join()
    with run.locked(wait_seconds=5):
        pass


def test_what_a_kill_left_half_written_stays_a_line_of_its_own(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    with Reporter(run, 1) as reporter:
        reporter.event("first", "one")
    with run.events.open("ab") as file:
        file.write(b'{"torn": ')
    with Reporter(run, 2) as reporter:
        reporter.event("second", "two")
        reporter.sync()
    lines = run.events.read_text().splitlines()
    assert len(lines) == 3
    run.events.write_text("\n".join([lines[0], lines[2]]))
    assert [event["attempt"] for event in events_of(run)] == [1, 2]
