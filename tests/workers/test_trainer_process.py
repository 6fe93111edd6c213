"""Signals reach the trainer's process and no other."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import BadSetting
from app.planning.devices import Device
from tests.harness.runs import create_run, until
from workers.trainer_process import TrainerProcess, check_network_isolation
from workers.training.processes.fork_server import ForkServer

CPU = Device("cpu", "CPU", 2**30, "cpu")

LAST_PROCESS_ID = Path("/proc/sys/kernel/ns_last_pid")


def bystander(pid: int) -> subprocess.Popen[bytes] | None:
    """A process with the id of one that has ended; None if the kernel does not allow choosing the id."""
    for _ in range(50):
        try:
            LAST_PROCESS_ID.write_text(str(pid - 1))
        except OSError:
            return None
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    return None


@pytest.fixture(params=[False, True], ids=["started directly", "forked"])
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer | None]:
    """A fork server, or none."""
    server = ForkServer() if request.param else None
    yield server
    if server is not None:
        server.close()


def test_a_process_that_reuses_a_dead_trainer_s_pid_is_not_signalled(
    tmp_path: Path, server: ForkServer | None
) -> None:
    run = create_run(tmp_path / "run")
    trainer = TrainerProcess(run, [CPU], silence_seconds=60, fork_server=server)
    until(lambda: trainer.status() is None and trainer.pid is not None)
    pid = trainer.pid
    assert pid is not None
    trainer.kill()
    until(lambda: trainer.status() is not None, 10)
    until(lambda: not Path(f"/proc/{pid}").exists(), 10)
    other = bystander(pid)
    if other is None:
        pytest.skip("needs a kernel that gives out a chosen process id")
    try:
        trainer.interrupt(0)
        trainer.sign_of_life()
        trainer.kill()
        trainer.close()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()


def test_a_trainer_without_network_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_network_isolation()
    except BadSetting as error:
        pytest.skip(str(error))
    run = create_run(tmp_path / "run")
    shown = tmp_path / "devices"
    python = tmp_path / "python"  # instead of a trainer: what network it would have
    python.write_text(f"#!/bin/sh\ncat /proc/net/dev > {shown}\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    seen = []
    for network in (True, False):
        trainer = TrainerProcess(run, [CPU], 60, network=network)
        until(lambda trainer=trainer: trainer.status() is not None, 10)
        trainer.close()
        assert trainer.status() == 0, run.trainer_log.read_text()
        _, _, *devices = shown.read_text().splitlines()
        seen.append([(line.split(":")[0].strip(), int(line.split()[1])) for line in devices])
    with_network, without = seen
    assert without == [("lo", 0)]  # which is down, and has received nothing
    assert with_network != without


def test_a_worker_reports_if_it_cannot_isolate_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
    unshare.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(BadSetting, match="Operation not permitted"):
        check_network_isolation()
    unshare.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadSetting, match="util-linux"):
        check_network_isolation()
