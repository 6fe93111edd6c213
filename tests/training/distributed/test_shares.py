"""Shares of the work that follow the measured speeds of unequal ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.training.checkpoints.state import LearnedShares
from workers.training.distributed.partition import partition
from workers.training.distributed.shares import LONGEST_PERIOD, Shares, WindowWork, by_speed, waiting

TOKENS = [7, 31, 12, 48, 5, 22, 40, 9, 16, 33, 27, 3, 45, 18, 29, 11]


def window(shares: list[float], speeds: list[float]) -> list[WindowWork]:
    """What ranks of these speeds, in tokens per second, do in a window that is divided by these shares."""
    taken = partition(np.array(TOKENS * 4), shares)
    tokens = [sum((TOKENS * 4)[place] for place in own) for own in taken]
    return [
        WindowWork(
            micro_batches=len(own),
            samples=len(own),
            tokens=count,
            cost=count,
            padded_tokens=count,
            seconds=count / speed,
            data_seconds=0.0,
            peak_bytes=0,
        )
        for own, count, speed in zip(taken, tokens, speeds, strict=True)
    ]


def trained(shares: Shares, speeds: list[float], steps: range) -> dict[int, list[float]]:
    """Trains windows; returns the changes by step."""
    found = {step: shares.record_window(step, window(shares.now, speeds)) for step in steps}
    return {step: new for step, new in found.items() if new is not None}


def make(planned: list[float], **changes: object) -> Shares:
    fields = {"learned": LearnedShares(), "adapts": True, "recorded": {}, "until": 0, **changes}
    return Shares(planned, **fields)  # type: ignore[arg-type]


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4))
def test_all_ranks_finish_together_after_a_few_windows(speeds: list[float]) -> None:
    shares = make([1 / len(speeds)] * len(speeds))
    trained(shares, speeds, range(1, 40))
    assert waiting(shares.now, speeds) <= 0.1
    assert sum(shares.now) == pytest.approx(1.0)


def test_shares_that_fit_are_not_changed() -> None:
    assert trained(make([0.5, 0.5]), [1.0, 1.001], range(1, 200)) == {}


def test_the_first_window_is_not_measured() -> None:
    shares = make([0.5, 0.5])
    shares.record_window(1, window([0.5, 0.5], [1.0, 100.0]))  # the first rank still loads libraries
    assert trained(shares, [1.0, 1.0], range(2, 100)) == {}


def test_measurements_become_rarer() -> None:
    learned = LearnedShares()
    trained(make([0.5, 0.5], learned=learned), [1.0, 1.0], range(1, 200))
    assert learned.period == LONGEST_PERIOD


def test_a_rank_that_becomes_slower_gets_less() -> None:
    shares = make([0.5, 0.5])
    trained(shares, [1.0, 1.0], range(1, 100))
    trained(shares, [1.0, 0.5], range(100, 200))
    assert shares.now == pytest.approx([2 / 3, 1 / 3], rel=0.1)


def test_a_rank_without_samples_gets_one_again_at_some_time() -> None:
    learned = LearnedShares(shares=[0.999, 0.001])
    shares = make([0.5, 0.5], learned=learned)
    assert window(shares.now, [1.0, 1.0])[1].tokens == 0
    trained(shares, [1.0, 1.0], range(1, 1000))
    assert shares.now == pytest.approx([0.5, 0.5], abs=0.05)


def test_recorded_changes_are_made_again_and_no_others_before_the_last_step() -> None:
    first = make([0.5, 0.5])
    recorded = trained(first, [3.0, 1.0], range(1, 20))
    again = make([0.5, 0.5], recorded=recorded, until=20)
    used = []
    for step in range(1, 20):
        used.append(again.now)
        assert again.record_window(step, window(again.now, [1.0, 1.0])) is None
    assert used[0] == [0.5, 0.5]
    assert again.now == first.now


def test_a_rank_for_which_the_plan_has_no_sample_can_get_one() -> None:
    shares = make([1.0, 0.0])
    assert min(shares.now) > 0
    assert sorted(map(len, partition(np.array([5]), shares.now))) == [0, 1]


def test_shares_of_another_number_of_ranks_are_not_used() -> None:
    assert make([0.5, 0.5], learned=LearnedShares(shares=[0.2, 0.3, 0.5])).now == [0.5, 0.5]


def test_measurements_of_another_number_of_ranks_are_not_used() -> None:
    learned = LearnedShares(tokens=[100.0, 300.0], seconds=[1.0, 1.0], windows=2)
    shares = make([0.4, 0.3, 0.3], learned=learned)
    trained(shares, [1.0, 1.0, 1.0], range(1, 20))
    assert len(shares.now) == 3


def test_a_fixed_number_of_micro_batches_keeps_the_plan_s_shares() -> None:
    assert trained(make([0.5, 0.5], adapts=False), [3.0, 1.0], range(1, 100)) == {}


def test_nothing_measured_keeps_the_shares() -> None:
    assert by_speed([0.3, 0.7], [0.0, 0.0], [0.0, 0.0]) == [0.3, 0.7]


def test_a_rank_without_work_is_not_expected_to_be_faster_than_all_others() -> None:
    """Windows of fewer samples than ranks leave some rank without work for good."""
    assert by_speed([0.25] * 4, [8.0, 8.0, 8.0, 0.0], [1.0, 1.0, 1.0, 0.0]) == [0.25] * 4


def test_a_rank_without_work_gets_some_at_some_time() -> None:
    shares = [0.45, 0.45, 0.1]
    for _ in range(3):
        shares = by_speed(shares, [8.0, 8.0, 0.0], [1.0, 1.0, 0.0])
    assert shares[2] > 0.25
