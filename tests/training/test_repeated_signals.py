"""A trainer's end, if whatever takes its machine away signals it again and again."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness.runs import create_run, start_trainer
from tests.harness.specs import make_spec
from workers.run_directory import INTERRUPTED


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_repeated_signals_do_not_replace_the_exit_status(tmp_path: Path, number: signal.Signals) -> None:
    for attempt in range(3):
        run = create_run(tmp_path / str(attempt), make_spec(epochs=10_000))
        trainer = start_trainer(run)
        until = time.monotonic() + 60
        while not run.metrics.exists() and time.monotonic() < until:
            time.sleep(0.05)
        status = _signalled_until_its_end(trainer, number)
        assert status == INTERRUPTED, run.trainer_log.read_text()[-3000:]


def _signalled_until_its_end(trainer: subprocess.Popen[bytes], number: signal.Signals) -> int:
    until = time.monotonic() + 60
    while trainer.poll() is None and time.monotonic() < until:
        trainer.send_signal(number)
        time.sleep(0.0005)
    trainer.kill()
    return trainer.wait(10)
