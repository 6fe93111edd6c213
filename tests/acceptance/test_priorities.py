"""Jobs make way for one with a higher priority, and then train as if nothing had happened."""

from typing import Any

import pytest

from tests.harness.runs import log_of, until
from tests.harness.service import TRAINING, Accrue
from tests.harness.training import weight_difference

pytestmark = pytest.mark.thorough

DATA: dict[str, Any] = {
    "texts": [f"text number {n}" for n in range(64)],
    "max_length": 48,
}
LONG = {"max_steps": 500, "save_every": 1000}


def events_of(accrue: Accrue, job_id: str) -> list[str]:
    page = accrue.get(f"/v1/fine_tuning/jobs/{job_id}/events?limit=100")
    return [event["message"] for event in page["data"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_makes_way_and_loses_nothing(accrue: Accrue) -> None:
    accrue.serve()
    accrue.start("worker", ACCRUE_PREEMPTION="true")
    low = accrue.submit(dataset_config=DATA, training_config=LONG, tune="off")
    until(lambda: accrue.steps_logged(low) >= 5, 120)
    urgent = accrue.submit(dataset_config=DATA, training_config={"max_steps": 3}, priority=1)
    assert accrue.ended(urgent, 120)["status"] == "succeeded"
    done = accrue.steps_logged(low)
    assert done < LONG["max_steps"], "it had ended before it could make way"
    why = "Attempt 1 ended: a job with a higher priority needs its device. The job is queued."
    assert why in events_of(accrue, low)
    assert accrue.ended(low, 300)["status"] == "succeeded"
    alone = accrue.submit(dataset_config=DATA, training_config=LONG, tune="off")
    assert accrue.ended(alone, 300)["status"] == "succeeded"
    assert log_of(accrue.run(low)) == log_of(accrue.run(alone))
    assert weight_difference(accrue.run(low), accrue.run(alone)) == 0.0


def test_without_the_setting_a_job_waits(accrue: Accrue) -> None:
    accrue.serve()
    accrue.start("worker")
    low = accrue.submit(dataset_config=DATA, training_config={"max_steps": 100_000})
    until(lambda: accrue.job(low)["status"] == "running", 60)
    urgent = accrue.submit(dataset_config=DATA, training_config={"max_steps": 1}, priority=100)
    with pytest.raises(TimeoutError):
        until(lambda: accrue.job(urgent)["status"] != "queued", 16)
    assert accrue.job(low)["status"] == "running"
    accrue.post(f"{TRAINING}/{low}/cancel")
