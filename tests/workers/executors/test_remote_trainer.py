"""A trainer in an engine that lies, forgets, repeats itself or does not answer: what was submitted runs at
most once at a time, and its end is known."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.jobs.transitions import LostJob
from app.planning.devices import Device
from tests.harness.runs import create_run, log_of, small_data, until
from tests.harness.specs import make_spec
from workers.executors.process import ProcessExecutor, _processes
from workers.executors.protocol import Launch, LaunchStatus, Refused, Unreachable
from workers.executors.remote_trainer import LaunchParameters, RemoteTrainer, handle_of
from workers.executors.shared_files import SharedFiles
from workers.run_directory import INTERRUPTED, RunDirectory

pytestmark = pytest.mark.thorough

SILENCE = 3.0
STEPS = 12


class Engine(ProcessExecutor):
    """An engine whose answers can be replaced."""

    def __init__(self) -> None:
        super().__init__([Device("process:0", "CPU", 2**33, "cpu")])
        self.answer: LaunchStatus | None = None
        self.is_reachable = True
        self.fails_after_submitting = False
        self.refuses = False
        self.submitted: list[str] = []

    def submit(self, launch: Launch) -> None:
        self._check()
        if self.refuses:
            raise Refused("there is no such partition")
        if not _processes(launch.handle):
            self.submitted.append(launch.handle)
        super().submit(launch)
        if self.fails_after_submitting:
            self.fails_after_submitting = False
            raise Unreachable("the answer was lost")

    def poll(self, handle: str) -> LaunchStatus:
        self._check()
        return self.answer or super().poll(handle)

    def cancel(self, handle: str) -> None:
        self._check()
        super().cancel(handle)

    def _check(self) -> None:
        if not self.is_reachable:
            raise Unreachable("no route to host")


def steps(run: RunDirectory) -> list[int]:
    """The steps that are logged so far."""
    return [] if not run.metrics.exists() else [line["step"] for line in log_of(run)]


class Worker:
    """What a worker does with a trainer: it renews the lease until it is stopped."""

    def __init__(self, folder: Path, engine: Engine, **changes: Any) -> None:
        self.engine = engine
        self.run = create_run(folder / "run", make_spec(data=small_data(), max_steps=STEPS, **changes))
        self.trainers: list[RemoteTrainer] = []

    def launch(self, attempt: int = 1) -> RemoteTrainer:
        parameters = LaunchParameters(
            f"test-{os.getpid()}-{time.monotonic_ns()}", attempt, SILENCE, 20.0, True, ""
        )
        folder = self.run.path.parent / "launches"
        launch = Launch(handle_of(parameters.job_id, attempt), folder, 1, 1, False, 20.0)
        trainer = RemoteTrainer(self.engine, self.run, launch, parameters, [])
        self.trainers.append(trainer)
        return trainer

    def wait(self, trainer: RemoteTrainer, seconds: float = 90.0) -> int:
        """Renews until the trainer has ended. Returns its status."""
        ends = time.monotonic() + seconds
        while (status := trainer.status()) is None:
            assert time.monotonic() < ends, "it did not end"
            trainer.sign_of_life()
            time.sleep(0.1)
        trainer.close()
        return status

    def wait_for_steps(self, trainer: RemoteTrainer, count: int) -> None:
        def has_steps() -> bool:
            trainer.sign_of_life()
            return len(steps(self.run)) >= count

        until(has_steps, 60)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path, Engine())
    yield made
    made.engine.is_reachable = True
    for trainer in made.trainers:
        trainer.kill()
        trainer.close()
        made.engine.cancel(str(trainer.pid))


@pytest.mark.slow
def test_a_launch_whose_answer_was_lost_is_not_started_twice(worker: Worker) -> None:
    worker.engine.fails_after_submitting = True
    trainer = worker.launch()
    assert worker.wait(trainer) == 0
    assert len(worker.engine.submitted) == 1
    assert steps(worker.run) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_an_engine_that_does_not_answer_for_a_while_changes_nothing(worker: Worker) -> None:
    worker.engine.is_reachable = False
    trainer = worker.launch()
    time.sleep(2 * SILENCE)
    assert trainer.status() is None
    worker.engine.is_reachable = True
    worker.wait_for_steps(trainer, 1)
    worker.engine.is_reachable = False
    assert worker.wait(trainer) == 0, "the nodes say how it ended"
    assert steps(worker.run) == list(range(1, STEPS + 1))


def test_a_refused_launch_fails_with_the_engine_s_reason(worker: Worker) -> None:
    worker.engine.refuses = True
    assert worker.wait(worker.launch()) == 1
    failure = worker.run.failure()
    assert failure is not None
    assert (failure.code, failure.permanent) == ("not_started", True)
    assert "no such partition" in failure.message


@pytest.mark.parametrize(
    "answer",
    [LaunchStatus("unknown"), pytest.param(LaunchStatus("ended", "COMPLETED"), marks=pytest.mark.slow)],
)
def test_a_trainer_that_the_engine_has_lost_is_over_before_the_job_is_tried_again(
    tmp_path: Path, answer: LaunchStatus
) -> None:
    worker = Worker(tmp_path, Engine())
    worker.run = create_run(tmp_path / "long", make_spec(data=small_data(), max_steps=100_000))
    trainer = worker.launch()
    worker.wait_for_steps(trainer, 2)
    worker.engine.answer = answer
    assert worker.wait(trainer, 4 * SILENCE + 20) == 1
    worker.engine.answer = None
    until(lambda: not _processes(str(trainer.pid)), 5)
    failure = worker.run.failure()
    assert failure is not None
    assert (failure.code, failure.permanent) == ("trainer_lost", False)


@pytest.mark.slow
def test_an_engine_that_calls_an_ended_trainer_running_is_not_believed(worker: Worker) -> None:
    worker.engine.answer = LaunchStatus("running")
    assert worker.wait(worker.launch()) == 0


def test_a_trainer_whose_devices_are_taken_away_is_no_failure(worker: Worker) -> None:
    worker.run = create_run(worker.run.path.parent / "long", make_spec(data=small_data(), max_steps=100_000))
    trainer = worker.launch()
    worker.wait_for_steps(trainer, 2)
    for pid in _processes(str(trainer.pid)):
        os.kill(pid, 15)  # as an engine does before it takes a node away
    assert worker.wait(trainer) == INTERRUPTED
    assert trainer.evicted_because == "process took its devices away"
    assert any(path.name.startswith("step-") for path in worker.run.checkpoints.iterdir())


@pytest.mark.slow
def test_a_node_ends_if_its_worker_does_not_renew(worker: Worker) -> None:
    worker.run = create_run(worker.run.path.parent / "long", make_spec(data=small_data(), max_steps=100_000))
    trainer = worker.launch()
    worker.wait_for_steps(trainer, 2)
    worker.engine.is_reachable = False
    until(lambda: not _processes(str(trainer.pid)), SILENCE + 10)


@pytest.mark.slow
def test_only_the_newest_launch_trains(worker: Worker) -> None:
    worker.run = create_run(worker.run.path.parent / "long", make_spec(data=small_data(), max_steps=100_000))
    first = worker.launch()
    worker.wait_for_steps(first, 2)
    worker.engine.is_reachable = False  # the first one cannot be cancelled
    second = worker.launch(attempt=2)
    until(lambda: not _processes(str(first.pid)), SILENCE + 10)
    worker.engine.is_reachable = True
    before = len(steps(worker.run))
    worker.wait_for_steps(second, before + 2)
    newest = SharedFiles(worker.run.path.parent / "launches").launch()
    assert newest is not None
    assert newest.handle == second.pid
    with pytest.raises(LostJob):
        worker.launch(attempt=1)


def test_a_launch_that_has_not_started_is_cancelled_at_once(worker: Worker) -> None:
    worker.engine.is_reachable = False
    trainer = worker.launch()
    assert trainer.is_waiting
    trainer.interrupt(60.0)
    began = time.monotonic()
    assert worker.wait(trainer, 10) == INTERRUPTED
    assert time.monotonic() < began + SILENCE


@pytest.mark.slow
def test_a_killed_trainer_is_gone_when_it_says_so(worker: Worker) -> None:
    worker.run = create_run(worker.run.path.parent / "long", make_spec(data=small_data(), max_steps=100_000))
    trainer = worker.launch()
    worker.wait_for_steps(trainer, 1)
    trainer.kill()
    assert worker.wait(trainer, 20) < 0
    assert not _processes(str(trainer.pid))
