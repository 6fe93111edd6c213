"""Plans for pairs: a sample of two sequences takes the memory of two rows."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.contract.plan import TokenBudget
from app.planning.devices import GIB, Device
from app.planning.estimate import OfSamples
from app.planning.plan import make_plan, question_of, sample_length_of
from app.planning.planner import by_formula, capacity_of, solve
from tests.harness.preferences import objective_spec, preference_data
from tests.harness.specs import make_spec

GPU = Device(0, "NVIDIA", GIB, "cuda")
SPEC = make_spec()
PAIRS = SPEC.model_copy(
    update={
        "data": preference_data("dpo", 100, max_length=SPEC.data.max_length),
        "objective": objective_spec("dpo"),
    }
)
KNOWN = by_formula(SPEC.model.architecture)


@pytest.mark.parametrize("device", [GPU, Device("cpu", "CPU", GIB, "cpu")])
def test_half_as_many_pairs_fit_as_samples(device: Device) -> None:
    single = question_of(SPEC, [device], SPEC.data.max_length)
    paired = question_of(PAIRS, [device], PAIRS.data.max_length)
    estimate = KNOWN.estimates(single.recipe, single.sequence)
    alone = capacity_of(device, single, estimate, None, 64)
    pairs = capacity_of(device, paired, OfSamples(estimate, 2), None, 64)
    assert pairs.largest == alone.largest // 2
    assert paired.sample_tokens == 2 * single.sample_tokens
    of_pair, of_two = solve(paired, KNOWN).estimate.memory(3), estimate.memory(6)
    assert of_pair == of_two


def test_a_token_budget_holds_both_sequences() -> None:
    """At full length, a micro-batch of the plan's budget has as many tokens as its pairs."""
    plan = make_plan(PAIRS, [GPU], KNOWN, predicted=False)
    rule = plan.ranks[0].micro_batch_rule
    assert isinstance(rule, TokenBudget)
    pairs = plan.ranks[0].micro_batch_size
    assert pairs * PAIRS.data.tokens_per_sample <= rule.tokens
    assert plan.sample_length == sample_length_of(PAIRS, None) == SPEC.data.max_length


def test_a_pair_that_does_not_fit_is_named_with_both_its_sequences() -> None:
    small = Device(0, "small", GIB // 8, "cuda")
    plan = make_plan(PAIRS, [small], KNOWN, predicted=True)
    tokens = 2 * SPEC.data.max_length
    assert any(f"not even one sample of {tokens} tokens fits" in warning for warning in plan.warnings)


def test_kto_computes_one_sequence_at_a_time() -> None:
    labelled = PAIRS.model_copy(
        update={"data": preference_data("kto", 100), "objective": objective_spec("kto")}
    )
    assert question_of(labelled, [GPU], 64).sequences_per_sample == 1


def test_the_calculator_counts_pairs(client: TestClient) -> None:
    path = "/gradient-accumulation/calculate-batch-size"
    asked: dict[str, Any] = {
        "model_name": "gpt2",
        "target_batch_size": 64,
        "max_length": 256,
        "wait_seconds": 0,
    }
    of_pairs = client.post(path, json={**asked, "objective": "dpo"}).json()
    by_query = client.get(path, params={**asked, "objective": "dpo"}).json()
    single = client.post(path, json={**asked, "objective": "kto"}).json()
    assert by_query == of_pairs
    assert of_pairs["explanation"].startswith("64 pairs per step")
    assert "pairs of 2 × 256 tokens" in of_pairs["explanation"]
    assert of_pairs["max_micro_batch_size"] < single["max_micro_batch_size"]
    assert client.post(path, json={**asked, "objective": "ppo"}).status_code == 422
