"""The micro-batch that is fast enough, and estimates that start from what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contract.memory_profile import Recipe
from app.contract.plan import TokenBudget
from app.contract.reports import EQUALLY_FAST_SHARE, smallest_of_the_fastest
from app.devices.gpus import this_cpu
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import GIB, Device
from app.planning.estimate import ByFormula, ByMeasurement, MeasuredPeak, by_formula
from app.planning.interpolation import interpolated
from app.planning.plan import make_plan
from app.planning.planner import PlannerEvidence
from app.planning.throughput import CPU_TOKENS, Throughput, unpadded_tokens, useful_tokens
from tests.harness.specs import make_spec

GPU = Device(0, "NVIDIA L4", 24 * GIB, "cuda")
MEASURED = Throughput(((256, 900.0), (512, 990.0), (1024, 1000.0), (2048, 970.0)))
ARCHITECTURE = from_config(TINY_GPT2)
CUDA = Recipe(device="cuda", precision="bf16")


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e6)), min_size=1, max_size=8))
def test_smallest_of_the_fastest_is_fast_and_minimal(pairs: list[tuple[int, float]]) -> None:
    best = max(rate for _, rate in pairs)
    found = smallest_of_the_fastest(pairs)
    assert any(tokens == found and rate >= EQUALLY_FAST_SHARE * best for tokens, rate in pairs)
    assert all(rate < EQUALLY_FAST_SHARE * best for tokens, rate in pairs if tokens < found)


def test_a_throughput_plateau_limits_the_micro_batch() -> None:
    assert MEASURED.useful(10**6) == 512
    assert MEASURED.useful(400) == 256  # memory allows no more
    assert MEASURED.useful(100) == 100  # nothing so small was measured


@pytest.mark.parametrize("measured", [None, Throughput(((20, 900.0),))])  # one size says nothing of others
def test_without_measurements_memory_limits_gpus_and_a_default_limits_cpus(
    measured: Throughput | None,
) -> None:
    assert useful_tokens(measured, "cuda", 4096) == 4096
    assert useful_tokens(measured, "cpu", 4096) == CPU_TOKENS
    assert useful_tokens(measured, "cpu", 100) == 100
    assert useful_tokens(MEASURED, "cpu", 10**6) == 512


@pytest.mark.parametrize(
    ("width", "tokens"),
    [(16, 2048), (64, 2048), (128, 1024), (181, 512), (256, 512), (4096, 512), (None, 512)],
)
def test_narrow_models_take_more_tokens_on_a_cpu(width: int | None, tokens: int) -> None:
    assert useful_tokens(None, "cpu", 10**6, width) == tokens
    assert useful_tokens(None, "cpu", 300, width) == 300


@pytest.mark.parametrize(
    ("width", "tokens"), [(64, None), (128, None), (256, 768), (768, 768), (1024, None), (None, None)]
)
def test_without_padding_a_cpu_takes_more_tokens_unless_sizes_were_measured(
    width: int | None, tokens: int | None
) -> None:
    assert unpadded_tokens(None, "cpu", 10**6, width) == tokens
    assert unpadded_tokens(None, "cpu", 600, width) == (None if tokens is None else 600)
    assert unpadded_tokens(None, "cpu", 512, width) is None  # what memory allows with padding, too
    assert unpadded_tokens(MEASURED, "cpu", 10**6, width) is None
    assert unpadded_tokens(None, "cuda", 10**6, width) is None


def test_a_sweep_without_a_plateau_does_not_limit_larger_micro_batches() -> None:
    growing = Throughput(((208, 1000.0), (416, 1400.0), (832, 1790.0)))
    assert not growing.reached_plateau
    assert MEASURED.reached_plateau
    assert useful_tokens(growing, "cuda", 10**6) == 10**6
    assert useful_tokens(growing, "cpu", 10**6) == 832


def test_interpolated_rates_lie_between_the_measured_ones() -> None:
    assert [MEASURED.at(tokens) for tokens in (1, 256, 384, 2048, 9999)] == [900, 900, 945, 970, 970]


PLACED = st.tuples(st.floats(0, 1e6), st.floats(-1e9, 1e9))


@given(st.lists(PLACED, min_size=1, max_size=6), st.floats(-10, 2e6))
def test_interpolation_stays_within_the_points(points: list[tuple[float, float]], at: float) -> None:
    points = sorted(dict(points).items())
    values = [value for _, value in points]
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert min(values) - slack <= interpolated(points, at) <= max(values) + slack


def test_a_plan_never_exceeds_the_throughput_plateau() -> None:
    spec, estimates = make_spec(effective_batch_size=4096, precision="bf16"), by_formula(ARCHITECTURE)
    large = make_plan(spec, [GPU], PlannerEvidence(estimates), predicted=True)
    lean = make_plan(
        spec, [GPU], PlannerEvidence(estimates, lambda recipe, sequence: MEASURED), predicted=True
    )
    assert lean.ranks[0].micro_batch_rule == TokenBudget(tokens=512)
    rule = large.ranks[0].micro_batch_rule
    assert isinstance(rule, TokenBudget)
    assert large.most_tokens == lean.most_tokens
    whole = 4096 * spec.data.max_length  # no micro-batch is larger than a batch
    assert rule.tokens == min(large.most_tokens or 0, whole)
    assert rule.tokens > 512
    assert lean.effective_batch_size == large.effective_batch_size == 4096


@pytest.mark.parametrize("accumulating", [True, False])
def test_an_estimate_passes_through_measurements_and_keeps_the_slope_beyond_them(accumulating: bool) -> None:
    formula = ByFormula(ARCHITECTURE, CUDA, 64)

    def peak(estimate: ByFormula | ByMeasurement, rows: float) -> int:
        return estimate.memory(rows, accumulating=accumulating).peak_allocated_bytes

    points = tuple(
        MeasuredPeak(64 * rows, accumulating, peak(formula, rows) + extra)
        for rows, extra in ((4, 10**7), (16, 3 * 10**7))
    )
    measured = ByMeasurement(formula, "cuda", 64, points)
    assert [peak(measured, 4), peak(measured, 16)] == [point.bytes for point in points]
    assert peak(measured, 10) - peak(formula, 10) == pytest.approx(2 * 10**7, abs=2)
    assert peak(measured, 40) - peak(measured, 16) == peak(formula, 40) - peak(formula, 16)
    assert measured.source == "measured"


@pytest.mark.parametrize(("width", "unpadded"), [(128, None), (256, 768)])
def test_a_cpu_s_plan_says_how_large_micro_batches_are_without_padding(
    width: int, unpadded: int | None
) -> None:
    architecture = from_config({**TINY_GPT2, "n_embd": width})
    known = PlannerEvidence(by_formula(architecture), architecture=architecture)
    plan = make_plan(make_spec(effective_batch_size=4096), [this_cpu()], known, predicted=True)
    rule = plan.ranks[0].micro_batch_rule
    assert isinstance(rule, TokenBudget)
    assert rule.unpadded_tokens == unpadded
    assert unpadded is None or rule.tokens < unpadded < (plan.most_tokens or 0)


def test_a_plan_with_packing_has_one_budget() -> None:
    architecture = from_config({**TINY_GPT2, "n_embd": 256})
    spec = make_spec(effective_batch_size=4096)
    packed = spec.model_copy(update={"data": spec.data.model_copy(update={"packing": True})})
    known = PlannerEvidence(by_formula(architecture), architecture=architecture)
    rule = make_plan(packed, [this_cpu()], known, predicted=True).ranks[0].micro_batch_rule
    assert isinstance(rule, TokenBudget)
    assert rule.unpadded_tokens is None
