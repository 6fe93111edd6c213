"""Killed trainers and workers: nothing is lost or done twice, and the result is the same."""

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import STEPS, end_of, is_alive, kill_trainer_at, submit
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough

DRAWN = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
"""Different in each run, but the same in all processes of one run, since each of them collects the tests."""


@pytest.fixture(scope="module")
def undisturbed(shared: Accrue) -> dict[str, Any]:
    """The end of a run that nothing happened to."""
    job_id = submit(shared)
    job = shared.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 1), job["error"]
    end = end_of(shared, job_id)
    assert len(end["log"]) == STEPS
    return end


FIRST, SECOND = sorted(DRAWN.sample(range(1, STEPS - 15), 2))


@pytest.mark.parametrize("step", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])
def test_a_killed_trainer_s_job_resumes_and_ends_bit_for_bit_the_same(
    shared: Accrue, undisturbed: dict[str, Any], step: int
) -> None:
    job_id = submit(shared)
    kill_trainer_at(shared, job_id, step)
    job = shared.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2), job["error"]
    assert end_of(shared, job_id) == undisturbed
    kinds = [event["type"] for event in shared.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]]
    assert kinds.count("started") == 2


def test_a_killed_worker_s_trainer_ends_and_another_worker_claims_the_job(
    accrue: Accrue, undisturbed: dict[str, Any]
) -> None:
    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 10)
    trainer = accrue.trainer_of(job_id)
    assert trainer is not None
    worker.kill()
    until(lambda: not is_alive(trainer), 5)
    assert accrue.job(job_id)["status"] == "running"
    accrue.start("worker")
    job = accrue.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2), job["error"]
    assert end_of(accrue, job_id) == undisturbed


def test_a_stopped_worker_returns_its_job_with_a_checkpoint(
    accrue: Accrue, undisturbed: dict[str, Any]
) -> None:
    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue, save_every=1000)
    until(lambda: accrue.steps_logged(job_id) >= 10)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    job = accrue.job(job_id)
    assert (job["status"], job["waiting"]["reason"]) == ("queued", "no_worker")
    accrue.start("worker")
    assert accrue.ended(job_id)["status"] == "succeeded"
    resumed = [
        e for e in accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"] if e["type"] == "resumed"
    ]
    assert resumed[0]["data"]["step"] >= 10
    assert end_of(accrue, job_id) == undisturbed


def test_a_running_job_is_paused_resumed_and_cancelled(shared: Accrue) -> None:
    job_id = submit(shared, max_steps=100_000)
    path = f"{TRAINING}/{job_id}"
    until(lambda: shared.steps_logged(job_id) >= 3)
    assert shared.post(f"{path}/pause")["requested"] == "pause"
    until(lambda: shared.job(job_id)["status"] == "paused", 30)
    assert shared.trainer_of(job_id) is None
    steps = shared.steps_logged(job_id)
    shared.post(f"{path}/resume")
    until(lambda: shared.steps_logged(job_id) > steps)
    shared.post(f"{path}/cancel")
    job = shared.ended(job_id)
    assert (job["status"], job["error"]) == ("cancelled", None)
    assert shared.trainer_of(job_id) is None


def test_a_job_that_always_crashes_fails_with_the_reason(shared: Accrue) -> None:
    """Whichever of a trainer's processes is killed, and whenever, it is a crash."""
    job_id = submit(shared, max_steps=100_000, save_every=100_000)
    while shared.job(job_id)["status"] not in ("failed", "succeeded"):
        pid = shared.trainer_of(job_id)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job = shared.job(job_id)
    assert (job["status"], job["error"]["code"], job["attempt"]) == ("failed", "trainer_killed", 3)


def test_a_job_that_takes_too_long_fails(shared: Accrue) -> None:
    job = shared.ended(submit(shared, max_steps=100_000, timeout_seconds=8))
    assert (job["status"], job["error"]["code"]) == ("failed", "timeout")


def test_accrue_up_starts_and_stops_service_and_worker(accrue: Accrue) -> None:
    both = accrue.start("up")
    until(accrue.answers, 20)
    until(lambda: accrue.get("/readyz")["workers"] == 1, 20)
    children = Path(f"/proc/{both.pid}/task/{both.pid}/children").read_text().split()
    assert len(children) == 2
    both.send_signal(signal.SIGINT)
    assert both.wait(30) == 0
    assert not any(is_alive(int(child)) for child in children)
