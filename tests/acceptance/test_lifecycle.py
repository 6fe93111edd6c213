"""Processes that end together, however one of them ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings import Settings
from app.storage.database import ChangeDetector, Database
from tests.harness.runs import until
from tests.harness.service import Accrue

pytestmark = pytest.mark.thorough


def processes_of(data: Path) -> dict[int, str]:
    """The processes that work on a data folder: the command line of each, by process id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"ACCRUE_DATA_DIR={data}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: line for pid, line in found.items() if line}


@pytest.fixture
def up(accrue: Accrue) -> Iterator[subprocess.Popen[bytes]]:
    """`accrue up` with everything that it starts, including the profiler."""
    env = {**accrue.env, "ACCRUE_PROFILER": "true"}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "up"], env=env, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until(accrue.answers, 60)
    until(lambda: any("workers.profiling" in line for line in processes_of(accrue.data).values()), 60)
    yield process
    for pid in processes_of(accrue.data):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_accrue_up(accrue: Accrue, up: subprocess.Popen[bytes], how: signal.Signals) -> None:
    up.send_signal(how)
    up.wait(60)
    until(lambda: not processes_of(accrue.data), 60)
    assert not accrue.answers()


def test_a_second_worker_waits_for_the_first_ones_trainer_and_says_so(accrue: Accrue) -> None:
    accrue.serve()
    accrue.start("worker")
    long = {"texts": ["some text to be learned"] * 64, "max_length": 32}
    first = accrue.submit(dataset_config=long, training_config={"max_steps": 100_000})
    until(lambda: accrue.job(first)["status"] == "running", 60)
    until(lambda: accrue.trainer_of(first) is not None, 60)
    accrue.start("worker")
    second = accrue.submit(dataset_config=long, training_config={"max_steps": 1})
    log = accrue.data.parent / "processes.log"
    until(lambda: "another process of Accrue uses the device" in log.read_text(), 60)
    assert accrue.job(second)["status"] == "queued"
    accrue.post(f"/gradient-accumulation/training/{first}/cancel")
    assert accrue.ended(second)["status"] == "succeeded"


def test_database_changes_are_detected_without_a_query(database: Database, settings: Settings) -> None:
    changes = ChangeDetector(database)
    assert changes.any()
    if database.is_sqlite:
        changes.any()
        assert not any(changes.any() for _ in range(20))
        with database.writing() as session:
            from app.security import keys

            keys.create(session, "test", ["read"], None)
        assert changes.any()
    else:
        assert sum(changes.any() for _ in range(20)) == 4
