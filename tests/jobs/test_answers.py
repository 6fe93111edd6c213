"""What a dry run would cost."""

import pytest

from app.jobs.answers import dry_run_answer
from app.jobs.lifecycle import Submission
from app.statistics.performance import Speed
from tests.harness.specs import cpu_plan, make_spec


def submission(device: str) -> Submission:
    spec = make_spec()
    plan = cpu_plan(spec).model_copy(update={"device": device, "predicted_duration_seconds": 7200.0})
    return Submission(spec, plan, {}, {}, None, None, {}, 0, paused=False)


@pytest.mark.parametrize(
    ("device", "cost", "hours", "told"),
    [("cuda", 2.5, 2.0, 5.0), ("cuda", None, 2.0, None), ("cpu", 2.5, None, None)],
)
def test_gpu_hours_and_cost_are_reported_only_for_gpus(
    device: str, cost: float | None, hours: float | None, told: float | None
) -> None:
    answer = dry_run_answer(submission(device), Speed("ftjob-1", 1.0, 10.0), cost)
    assert (answer.gpu_hours, answer.gpu_cost) == (hours, told)
