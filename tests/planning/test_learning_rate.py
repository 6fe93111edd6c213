import pytest

from app.planning.learning_rate import default_rule, scale, warmup_steps


@pytest.mark.parametrize(
    ("rule", "expected"), [("sqrt", 2.0), ("linear", 4.0), ("inverse", 0.25), ("none", 1.0)]
)
def test_scaling_rules(rule: str, expected: float) -> None:
    assert scale(rule, 4) == expected  # type: ignore[arg-type]


def test_linear_for_sgd_and_square_root_for_the_rest() -> None:
    assert default_rule("sgd") == "linear"
    assert default_rule("adamw") == default_rule("lion") == "sqrt"


@pytest.mark.parametrize(
    ("batch", "steps"), [(512, 500), (513, 1000), (2048, 1000), (8192, 5000), (32768, 10000), (10**6, 20000)]
)
def test_warmup_grows_with_the_batch(batch: int, steps: int) -> None:
    assert warmup_steps(batch) == steps


def test_warmup_is_at_most_a_tenth_of_the_run() -> None:
    assert warmup_steps(64, steps_total=100) == 10
