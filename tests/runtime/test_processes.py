"""How service and worker are ended."""

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
    hurry_at = time.monotonic() + 0.2
    processes.end([stubborn], is_hurried=lambda: time.monotonic() > hurry_at)
    assert stubborn.returncode == 0


@pytest.mark.parametrize("stubborn", [99], indirect=True)
def test_a_process_that_does_not_end_is_killed(stubborn: subprocess.Popen[bytes]) -> None:
    processes.end([stubborn], seconds=0.2)
    assert stubborn.returncode == -9
