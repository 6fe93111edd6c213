"""How a launch counts as ended, from what its nodes report and its engine says, without any process."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.planning.devices import Device
from tests.harness.runs import create_run
from workers.executors.node import _Launch, _run
from workers.executors.protocol import Launch, LaunchStatus
from workers.executors.remote_trainer import LaunchParameters, RemoteTrainer, handle_of
from workers.executors.shared_files import LaunchOrder, NewerLaunch, NodeEnd, SharedFiles
from workers.run_directory import DISK_FULL, IN_USE, INTERRUPTED, LOST_RANK, RANKS_MUST_RESTART


class Engine:
    """An engine that starts nothing, and gives the answers that a test needs."""

    name = "engine"

    def __init__(self, answer: Callable[[], LaunchStatus]) -> None:
        self._answer = answer
        self.submitted: list[str] = []
        self.cancelled: list[str] = []

    def devices(self) -> list[Device]:
        return []

    def render(self, launch: Launch) -> str:
        return launch.handle

    def submit(self, launch: Launch) -> None:
        self.submitted.append(launch.handle)

    def poll(self, handle: str) -> LaunchStatus:
        return self._answer()

    def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        return "one\nsrun: error: task 0: Out Of Memory\n", 0


def launched(folder: Path, engine: Engine, nodes: int = 2) -> RemoteTrainer:
    parameters = LaunchParameters("ftjob-1", 1, 1.0, 20.0, True, "")
    launch = Launch(handle_of("ftjob-1", 1), folder / "launches", nodes, 1, False, 20.0)
    return RemoteTrainer(engine, create_run(folder / "run"), launch, parameters, [])


def status_of(trainer: RemoteTrainer, seconds: float = 20.0) -> int:
    ends = time.monotonic() + seconds
    while (status := trainer.status()) is None:
        assert time.monotonic() < ends
        trainer.sign_of_life()
        time.sleep(0.02)
    trainer.close()
    return status


def running() -> LaunchStatus:
    return LaunchStatus("running")


@pytest.mark.parametrize(
    ("ends", "status", "is_evicted"),
    [
        ([NodeEnd(handle="", status=0)] * 2, 0, False),
        ([NodeEnd(handle="", status=1), NodeEnd(handle="", status=INTERRUPTED, was_evicted=True)], 1, False),
        ([NodeEnd(handle="", status=LOST_RANK), NodeEnd(handle="", status=1)], 1, False),
        ([NodeEnd(handle="", status=DISK_FULL), NodeEnd(handle="", status=LOST_RANK)], DISK_FULL, False),
        ([NodeEnd(handle="", status=INTERRUPTED, was_evicted=True)] * 2, INTERRUPTED, True),
        ([NodeEnd(handle="", status=INTERRUPTED)] * 2, INTERRUPTED, False),
        ([NodeEnd(handle="", status=LOST_RANK)] * 2, LOST_RANK, False),
        ([NodeEnd(handle="", status=-9, was_evicted=True), NodeEnd(handle="", status=LOST_RANK)], -9, True),
    ],
)
def test_the_most_telling_node_decides(
    tmp_path: Path, ends: list[NodeEnd], status: int, is_evicted: bool
) -> None:
    engine = Engine(running)
    trainer = launched(tmp_path, engine)
    files = SharedFiles(tmp_path / "launches")
    for node, end in enumerate(ends):
        files.write_end(node, end.model_copy(update={"handle": trainer.pid}))
    assert status_of(trainer) == status
    assert (trainer.evicted_because is not None) == is_evicted
    assert engine.cancelled == [trainer.pid], "what is left of it is cancelled"


@pytest.mark.parametrize("status", [IN_USE, DISK_FULL, 1])
def test_a_report_counts_even_if_the_engine_has_already_said_that_the_launch_ended(
    tmp_path: Path, status: int
) -> None:
    files = SharedFiles(tmp_path / "launches")
    reported: list[bool] = []

    def ends_just_before_the_answer() -> LaunchStatus:
        if not reported:
            reported.append(True)
            files.write_end(0, NodeEnd(handle=handle_of("ftjob-1", 1), status=status))
        return LaunchStatus("ended", "COMPLETED")

    assert status_of(launched(tmp_path, Engine(ends_just_before_the_answer), nodes=1)) == status


def test_all_ranks_start_again_in_a_launch_of_their_own(tmp_path: Path) -> None:
    engine = Engine(running)
    trainer = launched(tmp_path, engine, nodes=1)
    files = SharedFiles(tmp_path / "launches")
    first = handle_of("ftjob-1", 1)
    files.write_end(0, NodeEnd(handle=first, status=RANKS_MUST_RESTART))
    ends = time.monotonic() + 10
    while len(engine.submitted) < 2 and time.monotonic() < ends:
        time.sleep(0.02)
    assert engine.submitted == [first, f"{first}.2"]
    assert trainer.is_waiting
    files.write_end(0, NodeEnd(handle=f"{first}.2", status=0))
    assert status_of(trainer) == 0


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_lost_launch_has_printed_last_is_in_the_message(tmp_path: Path, nodes: int) -> None:
    trainer = launched(tmp_path, Engine(lambda: LaunchStatus("ended", "OUT_OF_MEMORY")), nodes)
    assert status_of(trainer) == 1
    failure = trainer._run.failure()
    assert failure is not None
    assert failure.message == (
        "engine's job of the trainer ended without a result (OUT_OF_MEMORY). Its last output: srun: error: "
        "task 0: Out Of Memory"
    )
    assert not failure.permanent


def test_an_engine_that_took_the_devices_away_is_not_the_job_s_failure(tmp_path: Path) -> None:
    trainer = launched(tmp_path, Engine(lambda: LaunchStatus("ended", "NODE_FAIL", was_evicted=True)))
    assert status_of(trainer) == INTERRUPTED
    assert trainer.evicted_because == "engine took its devices away (NODE_FAIL)"
    assert trainer._run.failure() is None


def order(handle: str = "accrue-1", attempt: int = 1, **changes: object) -> LaunchOrder:
    values = {
        "executor": "engine", "run_dir": "/nowhere", "assignment_sha256": "0", "nodes": 1,
        "devices_per_node": 1, "silence_seconds": 1.0, "grace_seconds": 1.0, "network": True, "view": "",
    }  # fmt: skip
    return LaunchOrder(handle=handle, attempt=attempt, **{**values, **changes})


def test_a_worker_that_was_away_replaces_and_stops_no_later_launch(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    files.write_launch(order("accrue-1-1", 1))
    files.write_launch(order("accrue-1-2", 2))
    with pytest.raises(NewerLaunch):
        files.write_launch(order("accrue-1-1.2", 1))
    files.renew("accrue-1-2")
    files.request_stop("accrue-1-1", "kill")
    assert files.stop_requested("accrue-1-2") is None
    assert files.renewal("accrue-1-1") is None
    assert files.renewal("accrue-1-2") is not None


def note_starts(folder: Path, node: int) -> None:
    files = SharedFiles(folder)
    for _ in range(50):
        files.note_start("accrue-1", node)


def test_nodes_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    SharedFiles(tmp_path).write_launch(order(nodes=3))
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=note_starts, args=(tmp_path, node)) for node in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert SharedFiles(tmp_path).started(order(nodes=3)) == 3


@pytest.fixture
def files(tmp_path: Path) -> SharedFiles:
    return SharedFiles(tmp_path)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here takes time."""
    for name, seconds in (("LOOK", 0.02), ("POLL", 0.1), ("REST", 0.2), ("MARGIN", 0.2)):
        monkeypatch.setattr(f"workers.executors.remote_trainer._{name}_SECONDS", seconds)


@pytest.fixture(autouse=True)
def keep_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's handlers are for processes of its own."""
    monkeypatch.setattr("workers.executors.node.signal.signal", lambda *_: signal.SIG_DFL)


def test_a_node_whose_worker_is_gone_starts_nothing(files: SharedFiles) -> None:
    files.write_launch(order(silence_seconds=0.3))
    files.renew("accrue-1")
    assert _run(_Launch(files, order(silence_seconds=0.3)), 0) == INTERRUPTED
    assert files.started(order()) == 0
    assert files.ends(order())[0].status == INTERRUPTED


def test_a_changed_assignment_is_not_trained(files: SharedFiles, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    given = order(run_dir=str(run.path), assignment_sha256="0" * 64, silence_seconds=60.0)
    files.write_launch(given)
    launch = _Launch(files, given)
    files.renew("accrue-1")
    assert _run(launch, 0) == 1
    assert (files.started(given), files.ends(given)[0].status) == (0, 1)


def test_a_launch_ends_on_a_node_only_once(files: SharedFiles) -> None:
    files.write_launch(order())
    files.write_end(0, NodeEnd(handle="accrue-1", status=0))
    assert _run(_Launch(files, order()), 0) == 1
    assert files.ends(order())[0].status == 0


def test_a_request_that_comes_while_the_engine_answers_does_not_make_the_worker_ask_without_pause(
    tmp_path: Path,
) -> None:
    trainers: list[RemoteTrainer] = []
    asked: list[float] = []

    def answer() -> LaunchStatus:
        asked.append(time.monotonic())
        if len(asked) == 2:
            trainers[0].interrupt(60.0)
        return LaunchStatus("running" if len(asked) < 4 else "unknown")

    trainers.append(launched(tmp_path, Engine(answer), nodes=1))
    assert status_of(trainers[0]) == INTERRUPTED
    assert len(asked) < 20
