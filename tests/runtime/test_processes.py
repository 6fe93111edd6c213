"""How service and worker are ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from app.runtime import processes

STUBBORN = """
import signal, sys, time
requested = []
signal.signal(signal.SIGTERM, lambda *of: requested.append(of))
print("ready", flush=True)
while len(requested) < int(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture
def stubborn(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends at a number of SIGTERMs."""
    command = [sys.executable, "-c", STUBBORN, str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("stubborn", [1], indirect=True)
def test_a_process_gets_one_signal_and_the_time_that_it_takes(stubborn: subprocess.Popen[bytes]) -> None:
    processes.end([stubborn])
    assert stubborn.returncode == 0


@pytest.mark.parametrize("stubborn", [2], indirect=True)
def test_a_hurried_end_sends_a_second_signal(stubborn: subprocess.Popen[bytes]) -> None:
    processes.end([stubborn], further_signals=lambda: 1)
    assert stubborn.returncode == 0


@pytest.mark.parametrize("stubborn", [99], indirect=True)
def test_a_process_that_does_not_end_is_killed(stubborn: subprocess.Popen[bytes]) -> None:
    processes.end({stubborn: 0.2})
    assert stubborn.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stubborn", [99], indirect=True)
def test_a_second_hurry_kills_at_once(stubborn: subprocess.Popen[bytes]) -> None:
    processes.end([stubborn], further_signals=lambda: 2)
    assert stubborn.returncode == -signal.SIGKILL


UP = f"""
import subprocess, sys
from app.runtime import processes

STUBBORN = {STUBBORN!r}
SIGNALS = {{"serve": 1, "worker": 2}}

def start(part):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, str(SIGNALS[part])], stdout=subprocess.PIPE,
                               start_new_session=True)
    process.stdout.readline()
    print(part, flush=True)
    return process

processes.start = start
processes._NOTICE_SECONDS = 0.1
sys.exit(processes.up())
"""
"""`accrue up` with a worker that ends at its second SIGTERM."""


def test_another_interruption_hurries_the_worker_but_not_one_that_follows_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as both:
        assert both.stderr is not None
        wait_for_worker(both)
        for _ in range(2):
            both.send_signal(signal.SIGHUP)  # by a closing terminal, and by its shell
        assert b"checkpoints" in both.stderr.readline()
        time.sleep(1.2)
        assert both.poll() is None
        both.send_signal(signal.SIGINT)
        assert both.wait(20) == 0


def test_a_closed_terminal_does_not_keep_a_worker_from_ending_in_its_time() -> None:
    closed_by_us, theirs = os.pipe()
    with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.PIPE, stderr=theirs) as both:
        os.close(theirs)
        wait_for_worker(both)
        os.close(closed_by_us)
        for _ in range(10):  # each is a second after the one before, as `up` receives them
            assert both.poll() is None, "the worker has not been given up"
            both.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                both.wait(1.5)
                break
        assert both.returncode == 0


def wait_for_worker(both: subprocess.Popen[bytes]) -> None:
    """Waits until `up`, whose signal handlers are there by then, has started both processes."""
    assert both.stdout is not None
    assert [both.stdout.readline(), both.stdout.readline()] == [b"serve\n", b"worker\n"]
