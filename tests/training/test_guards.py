from hypothesis import given
from hypothesis import strategies as st

from workers.training.checkpoint import TrainingState
from workers.training.guards import (
    WINDOWS_BEFORE_GROWTH,
    learn_larger_budget,
    learn_smaller_budget,
    spike,
)


@given(limit=st.integers(1, 4000))
def test_a_learned_budget_comes_to_rest_just_below_what_fits(limit: int) -> None:
    """A device that fits micro-batches of up to `limit` tokens, and a window that fills every budget."""
    state = TrainingState()
    learn_smaller_budget(state, 8000)
    failures = 0
    for _ in range(40 * WINDOWS_BEFORE_GROWTH):
        assert state.token_budget is not None
        if state.token_budget > limit:
            learn_smaller_budget(state, state.token_budget)
            failures += 1
        else:
            learn_larger_budget(state, state.token_budget, None)
    assert state.token_budget is not None
    assert state.token_budget <= limit
    assert state.token_budget >= limit / 1.2 - 1  # growing by less than a tenth is not tried
    assert failures <= 16


def test_a_budget_never_grows_beyond_the_plan() -> None:
    state = TrainingState()
    learn_smaller_budget(state, 1000)
    for _ in range(10 * WINDOWS_BEFORE_GROWTH):
        learn_larger_budget(state, 100, 600)
    assert state.token_budget == 600


def test_without_a_failure_nothing_is_learned() -> None:
    state = TrainingState()
    assert learn_larger_budget(state, 100, None) is None
    assert state.token_budget is None


def test_a_spike_is_told_by_its_z_score() -> None:
    losses = [2.0, 2.2] * 10  # mean 2.1, deviation 0.1
    assert spike(losses, 3.0)(2.39)
    assert not spike(losses, 3.0)(2.41)
    assert spike(losses, 3.0)(0.5)
    assert spike(losses[:9], 3.0)(100.0)
