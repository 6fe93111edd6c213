"""A trainer's process is signalled, and nobody else's."""

import subprocess
from pathlib import Path

import pytest

from app.planning.devices import Device
from tests.runs import lay_order, until
from workers.trainer_process import TrainerProcess

LAST_PROCESS_ID = Path("/proc/sys/kernel/ns_last_pid")


def bystander(pid: int) -> subprocess.Popen[bytes] | None:
    """A process that is given the id of another that is gone; null where the kernel does not do it."""
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


def test_whoever_has_a_dead_trainer_s_process_id_is_left_alone(tmp_path: Path) -> None:
    trainer = TrainerProcess(
        lay_order(tmp_path / "run"), Device("cpu", "CPU", 2**30, "cpu"), silence_seconds=60
    )
    trainer.kill()
    until(lambda: trainer.status() is not None, 10)
    other = bystander(trainer.pid)
    if other is None:
        pytest.skip("needs a kernel that gives out a chosen process id")
    try:
        trainer.ask_to_stop(0)
        trainer.sign_of_life()
        trainer.kill()
        trainer.close()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()
