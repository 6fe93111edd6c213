"""Faults of the ranks of a run: it ends soon, leaves no process, and the next attempt trains the same model.

`make test-faults` runs them; docs/faults.md lists them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from app.contract.spec import Spec
from tests.harness.runs import create_run, small_data, until, with_ranks
from tests.harness.specs import make_optimizer, make_spec
from tests.harness.training import events_of_kind, log_of_run, weight_difference
from workers.run_directory import DISK_FULL, INTERRUPTED, LOST_RANK, RunDirectory

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

RANKS = 3
ENDS_WITHIN = 15.0
SECONDS = 240.0
STEPS = 14
LONG = 300
"""Steps of runs that something happens to while they train."""


def spec(steps: int = STEPS) -> Spec:
    """With SGD, whose steps are as small as the gradient: Adam's amplify rounding over many steps."""
    optimizer = make_optimizer("sgd", 1e-2)
    return make_spec(
        data=small_data(), effective_batch_size=12, max_steps=steps, save_every=4, optimizer=optimizer
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run on one device, to which nothing happened."""
    run = create_run(tmp_path_factory.mktemp("alone") / "run", spec())
    assert started(run).wait(SECONDS) == 0
    return run


@pytest.fixture(scope="module")
def long_alone(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = create_run(tmp_path_factory.mktemp("alone") / "run", spec(LONG))
    assert started(run).wait(SECONDS) == 0
    return run


@pytest.fixture
def long_run(tmp_path: Path) -> RunDirectory:
    return with_ranks(create_run(tmp_path / "run", spec(LONG)), [1 / RANKS] * RANKS)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return with_ranks(create_run(tmp_path / "run", spec()), [1 / RANKS] * RANKS)


def started(run: RunDirectory, fault: str = "") -> subprocess.Popen[bytes]:
    """A trainer in a session of its own, so that all of its processes can be found."""
    environment = {**os.environ, **({"ACCRUE_FAIL_POINTS": fault} if fault else {})}
    with run.trainer_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.training", str(run.path)],
            stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def processes_of(run: RunDirectory) -> list[int]:
    """All processes of a run: each has its path among its arguments."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = each.read_bytes().split(b"\0")  # those of a zombie are empty
        except OSError:
            continue
        if str(run.path).encode() in arguments:
            found.append(int(each.parent.name))
    return found


def has_begun(run: RunDirectory, trainer: subprocess.Popen[bytes]) -> None:
    """Waits for two more steps."""
    before = len(log_of_run(run))
    until(lambda: len(log_of_run(run)) >= before + 2 or trainer.poll() is not None, SECONDS)


def rank_of(pid: int) -> int | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    own = [each for each in environment if each.startswith(b"RANK=")]
    return int(own[0].removeprefix(b"RANK=")) if own else None


def ranks_of(run: RunDirectory) -> dict[int, int]:
    """The process ids of a run's ranks."""
    return {number: pid for pid in processes_of(run) if (number := rank_of(pid)) is not None}


def ended(trainer: subprocess.Popen[bytes], run: RunDirectory, within: float = SECONDS) -> int:
    """The exit status of a trainer, with which all of its processes have ended."""
    status = trainer.wait(within)
    until(lambda: not processes_of(run), ENDS_WITHIN)
    return status


def is_same(run: RunDirectory, alone: RunDirectory, bound: float = 1e-5) -> None:
    """Trains the rest without a fault, and compares the end with the run on one device."""
    own = run.assignment().spec
    with_ranks(create_run(run.path, own, attempt=2), [1 / RANKS] * RANKS)
    assert ended(started(run), run) == 0, run.trainer_log.read_text()[-3000:]
    assert weight_difference(run, alone) <= bound
    steps = [line["step"] for line in log_of_run(run)]
    assert steps == list(range(1, (own.max_steps or 0) + 1))


def longer(run: RunDirectory, fault: str) -> float:
    """How much later a rank that hangs is noticed: after several of the longest window, which depends on the
    machine's load."""
    if not fault.startswith("hang"):
        return 0.0
    times = [json.loads(line)["time"] for line in run.metrics.read_text().splitlines()]
    return 10 * max(later - before for before, later in pairwise(times))


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("fault", ["kill:3", "kill:6", "stop:5", "hang:7", "error:4"])
def test_a_rank_that(run: RunDirectory, alone: RunDirectory, fault: str, number: int) -> None:
    """A rank that other work slows down gets few of the 14 windows' micro-batches, perhaps none of some."""
    trainer = started(run, f"rank-{number}.micro_batch:{fault}")

    def has_happened() -> bool:
        return f"fail point rank-{number}" in run.trainer_log.read_text()

    until(lambda: has_happened() or trainer.poll() is not None, SECONDS)
    assert has_happened(), "the run ended before the fault"
    assert ended(trainer, run, ENDS_WITHIN + longer(run, fault)) not in (0, INTERRUPTED)
    failure = run.failure()
    assert failure is not None
    assert not failure.permanent
    is_same(run, alone)


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("at", [1, 8])
def test_a_rank_out_of_memory(run: RunDirectory, alone: RunDirectory, at: int, number: int) -> None:
    assert ended(started(run, f"rank-{number}.micro_batch:memory:{at}"), run) == 0, (
        run.trainer_log.read_text()[-3000:]
    )
    [event] = events_of_kind(run, "out_of_memory")
    assert event["data"]["rank"] == number
    assert weight_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("point", ["checkpoint.weights", "checkpoint.state", "trainer.saving"])
def test_a_full_disk_on_the_first_rank(run: RunDirectory, alone: RunDirectory, point: str) -> None:
    assert ended(started(run, f"{point}:full"), run) == DISK_FULL
    is_same(run, alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_launcher_that_is_ended_by(
    long_run: RunDirectory, long_alone: RunDirectory, number: signal.Signals
) -> None:
    trainer = started(long_run)
    has_begun(long_run, trainer)
    launcher = int(Path(f"/proc/{ranks_of(long_run)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, number)
    status = ended(trainer, long_run, ENDS_WITHIN)
    assert status == INTERRUPTED if number == signal.SIGTERM else status not in (0, LOST_RANK)
    is_same(long_run, long_alone, 1e-4)


@pytest.mark.parametrize("after", [0.0, 0.3, 1.0, 3.0])
def test_a_requested_stop(long_run: RunDirectory, long_alone: RunDirectory, after: float) -> None:
    trainer = started(long_run)
    until(lambda: len(ranks_of(long_run)) == RANKS, SECONDS)
    time.sleep(after)
    trainer.send_signal(signal.SIGTERM)
    assert ended(trainer, long_run, ENDS_WITHIN) in (0, INTERRUPTED)
    is_same(long_run, long_alone, 1e-4)


def test_a_rank_that_is_killed_again_and_again(long_run: RunDirectory, long_alone: RunDirectory) -> None:
    for _ in range(2):
        trainer = started(long_run)
        has_begun(long_run, trainer)
        os.kill(ranks_of(long_run)[1], signal.SIGKILL)
        assert ended(trainer, long_run, ENDS_WITHIN) != 0
    is_same(long_run, long_alone, 1e-4)
