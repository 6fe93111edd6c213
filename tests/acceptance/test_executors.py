"""Trainers that an engine runs: the same guarantees as for trainers of a worker's own machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import STEPS, end_of, is_alive, submit
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def undisturbed(shared: Accrue) -> dict[str, Any]:
    """The end of a run that a worker trained on its own machine."""
    job_id = submit(shared)
    assert shared.ended(job_id)["status"] == "succeeded"
    return end_of(shared, job_id)


@pytest.fixture
def engine(accrue: Accrue) -> Iterator[Accrue]:
    """A service whose worker runs trainers in an engine: here, processes that do not belong to the worker."""
    accrue.env |= {"ACCRUE_EXECUTOR": "process"}
    accrue.serve()
    yield accrue


def test_a_job_in_an_engine_ends_as_on_the_worker_s_machine(
    engine: Accrue, undisturbed: dict[str, Any]
) -> None:
    engine.start("worker")
    job_id = submit(engine)
    job = engine.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 1), job["error"]
    assert job["device"] == "process:0"
    assert end_of(engine, job_id) == undisturbed
