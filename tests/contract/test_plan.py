"""Plans as they are stored."""

import json

import pytest

from app.contract.plan import FixedSize, Plan, TokenBudget
from tests.harness.specs import cpu_plan, make_spec

EARLIER = {
    "predicted": False, "effective_batch_size": 12, "accumulation_steps": 2, "actual_batch_size_per_gpu": 6,
    "micro_batches": 2, "steps_total": 3, "predicted_duration_seconds": None, "source": "formula",
    "warnings": [], "precision": "fp32", "device": "cpu", "threads": 2, "most_tokens": 600,
    "cut": {"rule": "token_budget", "tokens": 512},
    "devices": [{"gpu_id": "cpu", "micro_batch_size": 6, "accumulation_steps": 2, "token_budget": 512,
                 "predicted_peak_bytes": 100, "memory_limit_bytes": 1000}],
    "remedies": [{"change": "method: lora", "predicted_peak_bytes": 40}],
}  # fmt: skip
"""As it was stored until November 2026."""


def test_a_plan_of_an_earlier_version_is_read_as_ranks() -> None:
    plan = Plan.model_validate(EARLIER)
    assert plan.ranks[0].micro_batch_rule == TokenBudget(tokens=512)
    assert (plan.ranks[0].expected_micro_batches, plan.ranks[0].micro_batch_size) == (2, 6)
    assert (plan.ranks[0].share_of_tokens, plan.ranks[0].name) == (1.0, None)
    assert [(other.change, other.one_sample_bytes, other.fits) for other in plan.alternatives] == [
        ("method: lora", 40, True)
    ]
    [device] = EARLIER["devices"]  # type: ignore[misc]
    assert plan.devices[0].model_dump(exclude={"name"}) == device


@pytest.mark.parametrize("rule", [None, FixedSize(samples=4)])
def test_a_plan_comes_back_from_json_as_it_was(rule: FixedSize | None) -> None:
    plan = cpu_plan(make_spec(), rule)
    stored = json.loads(plan.model_dump_json())
    assert Plan.model_validate(stored) == plan
    assert stored["devices"][0]["gpu_id"] == stored["ranks"][0]["gpu_id"]
