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
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, log_of_run, weight_difference
from workers.run_directory import DISK_FULL, INTERRUPTED, LOST_RANK, RunDirectory

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

RANKS = 3
ENDS_WITHIN = 15.0
SECONDS = 240.0
STEPS = 14


def spec() -> Spec:
    return make_spec(data=small_data(), effective_batch_size=12, max_steps=STEPS, save_every=4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run on one device, to which nothing happened."""
    run = create_run(tmp_path_factory.mktemp("alone") / "run", spec())
    assert started(run).wait(SECONDS) == 0
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return with_ranks(create_run(tmp_path / "run", spec()), [1 / RANKS] * RANKS)


def started(run: RunDirectory, fault: str = "") -> subprocess.Popen[bytes]:
    """A trainer in a session of its own, so that all of its processes can be found."""
    environment = {**os.environ, **({"ACCRUE_FAIL_POINTS": fault} if fault else {})}
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.training", str(run.path)],
            stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def processes_of(session: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == session and state not in ("Z", "X"):
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


def rank(session: int, number: int) -> int:
    """The process id of a rank."""
    [found] = [pid for pid in processes_of(session) if rank_of(pid) == number]
    return found


def ended(trainer: subprocess.Popen[bytes], within: float = SECONDS) -> int:
    """The exit status of a trainer, with which all of its processes have ended."""
    status = trainer.wait(within)
    until(lambda: not processes_of(trainer.pid), ENDS_WITHIN)
    return status


def is_same(run: RunDirectory, alone: RunDirectory) -> None:
    """Trains the rest without a fault, and compares the end with the run on one device."""
    with_ranks(create_run(run.path, spec(), attempt=2), [1 / RANKS] * RANKS)
    assert ended(started(run)) == 0, run.log.read_text()[-3000:]
    assert weight_difference(run, alone) <= 1e-5
    steps = [line["step"] for line in log_of_run(run)]
    assert steps == list(range(1, STEPS + 1))


def longer(run: RunDirectory, fault: str) -> float:
    """How much later a rank that hangs is noticed: after several of the longest window, which depends on the
    machine's load."""
    if not fault.startswith("hang"):
        return 0.0
    times = [json.loads(line)["time"] for line in run.metrics.read_text().splitlines()]
    return 10 * max(later - before for before, later in pairwise(times))


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("fault", ["kill:3", "kill:9", "stop:6", "hang:12", "error:5"])
def test_a_rank_that(run: RunDirectory, alone: RunDirectory, fault: str, number: int) -> None:
    trainer = started(run, f"rank-{number}.micro_batch:{fault}")
    until(lambda: f"fail point rank-{number}" in run.log.read_text(), SECONDS)
    assert ended(trainer, ENDS_WITHIN + longer(run, fault)) not in (0, INTERRUPTED)
    failure = run.failure()
    assert failure is not None
    assert not failure.permanent
    is_same(run, alone)


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("at", [1, 8])
def test_a_rank_out_of_memory(run: RunDirectory, alone: RunDirectory, at: int, number: int) -> None:
    assert ended(started(run, f"rank-{number}.micro_batch:memory:{at}")) == 0, run.log.read_text()[-3000:]
    [event] = events_of_kind(run, "out_of_memory")
    assert event["data"]["rank"] == number
    assert weight_difference(run, alone) <= 1e-5


@pytest.mark.parametrize("point", ["checkpoint.weights", "checkpoint.state", "trainer.saving"])
def test_a_full_disk_on_the_first_rank(run: RunDirectory, alone: RunDirectory, point: str) -> None:
    assert ended(started(run, f"{point}:full")) == DISK_FULL
    is_same(run, alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_launcher_that_is_ended_by(
    run: RunDirectory, alone: RunDirectory, number: signal.Signals
) -> None:
    trainer = started(run)
    has_begun(run, trainer)
    launcher = int(Path(f"/proc/{rank(trainer.pid, 0)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, number)
    status = ended(trainer, ENDS_WITHIN)
    assert status == INTERRUPTED if number == signal.SIGTERM else status not in (0, LOST_RANK)
    is_same(run, alone)


@pytest.mark.parametrize("after", [0.0, 0.3, 1.0, 3.0])
def test_a_requested_stop(run: RunDirectory, alone: RunDirectory, after: float) -> None:
    trainer = started(run)
    until(lambda: len(processes_of(trainer.pid)) > RANKS, SECONDS)
    time.sleep(after)
    trainer.send_signal(signal.SIGTERM)
    assert ended(trainer, ENDS_WITHIN) in (0, INTERRUPTED)
    is_same(run, alone)


def test_a_rank_that_is_killed_again_and_again(run: RunDirectory, alone: RunDirectory) -> None:
    for _ in range(2):
        trainer = started(run)
        has_begun(run, trainer)
        os.kill(rank(trainer.pid, 1), signal.SIGKILL)
        assert ended(trainer, ENDS_WITHIN) != 0
    is_same(run, alone)
