import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from workers.training.micro_batches.batches import (
    BatchLayout,
    Cursor,
    after,
    collate,
    cut_window,
    epoch_order,
    window_at,
)

lengths_of_windows = st.lists(st.integers(1, 500), min_size=1, max_size=80)
cuts = st.one_of(
    st.builds(TokenBudget, tokens=st.integers(1, 5000)),
    st.builds(FixedCount, micro_batches=st.integers(1, 100)),
    st.builds(FixedSize, samples=st.integers(1, 100)),
)


@given(lengths=lengths_of_windows, cut=cuts, by_length=st.booleans())
def test_a_cut_contains_each_sample_exactly_once(
    lengths: list[int], cut: MicroBatchRule, by_length: bool
) -> None:
    groups = cut_window(lengths, cut, by_length=by_length)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(groups)


@given(lengths=lengths_of_windows, tokens=st.integers(1, 5000), by_length=st.booleans())
def test_a_token_budget_is_kept_wherever_one_sample_allows(
    lengths: list[int], tokens: int, by_length: bool
) -> None:
    for group in cut_window(lengths, TokenBudget(tokens=tokens), by_length=by_length):
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= tokens


@given(lengths=lengths_of_windows, count=st.integers(1, 100))
def test_a_fixed_count_is_exact_and_minimises_the_largest_micro_batch(lengths: list[int], count: int) -> None:
    groups = cut_window(lengths, FixedCount(micro_batches=count))
    assert len(groups) == min(count, len(lengths))
    largest = max(len(group) * max(lengths[i] for i in group) for group in groups)
    fewer = cut_window(lengths, TokenBudget(tokens=largest - 1))
    assert len(fewer) > count or largest == max(lengths)


@given(lengths=lengths_of_windows, rows=st.integers(1, 100))
def test_a_fixed_size_is_an_upper_bound_and_sizes_are_even(lengths: list[int], rows: int) -> None:
    sizes = [len(group) for group in cut_window(lengths, FixedSize(samples=rows))]
    assert max(sizes) <= rows
    assert len(sizes) == -(-len(lengths) // rows)
    assert max(sizes) - min(sizes) <= 1


def test_a_random_first_micro_batch_respects_the_cut_s_limits() -> None:
    """One of 120 tokens and seven of 20 under 1,024: all fit at once, so nothing is drawn and nothing cut."""
    random = np.random.default_rng(0)
    assert len(cut_window([120] + [20] * 7, TokenBudget(tokens=1024), first=random)) == 1
    firsts = [
        cut_window([120] + [20] * 70, TokenBudget(tokens=400), first=np.random.default_rng(seed))[0]
        for seed in range(200)
    ]
    assert 0.0 < np.mean([0 in first for first in firsts]) < 0.4


@given(
    lengths=lengths_of_windows, tokens=st.integers(1, 5000), rows=st.integers(1, 20), by_length=st.booleans()
)
def test_rows_are_an_upper_bound_under_a_budget_too(
    lengths: list[int], tokens: int, rows: int, by_length: bool
) -> None:
    groups = cut_window(lengths, TokenBudget(tokens=tokens), by_length=by_length, rows=rows)
    assert max(map(len, groups)) <= rows
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))


def test_sorting_by_length_pads_less() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 64)

    def padded(by_length: bool) -> int:
        groups = cut_window(lengths, TokenBudget(tokens=2000), by_length=by_length)
        return int(sum(len(group) * lengths[group].max() for group in groups))

    assert padded(True) < 0.8 * padded(False)


@given(samples=st.integers(1, 200), batch=st.integers(1, 70), epochs=st.integers(1, 3))
def test_every_epoch_sees_every_sample_once_and_drops_nothing(samples: int, batch: int, epochs: int) -> None:
    cursor, seen = Cursor(0, 0), []
    while cursor.epoch < epochs:
        window = window_at(cursor, epoch_order(samples, 7, cursor.epoch), batch)
        assert 1 <= len(window) <= batch
        seen.append((cursor.epoch, window))
        cursor = after(cursor, len(window), samples)
    for epoch in range(epochs):
        own = np.concatenate([window for e, window in seen if e == epoch])
        assert sorted(own.tolist()) == list(range(samples))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_order(50, 1, 0).tolist() == epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 1, 1).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 2, 0).tolist()


def test_targets_are_the_next_tokens_that_count() -> None:
    rows = [
        (np.array([10, 11, 12, 13], np.int32), np.array([False, False, True, True])),
        (np.array([20, 21], np.int32), np.array([True, True])),
    ]
    batch = collate(rows, BatchLayout(pad_id=99))
    assert batch.input_ids.tolist() == [[10, 11, 12, 13], [20, 21, 99, 99]]
    assert batch.target_positions.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [12, 13, 21]


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_padding_on_the_right_changes_no_logit(family: str) -> None:
    from tests.harness.small_models import make_model

    model = make_model(family, torch.float64)
    alone = torch.tensor([[5, 6, 7]])
    padded = torch.tensor([[5, 6, 7, 0, 0], [9, 9, 9, 9, 9]])
    expected = model(input_ids=alone, use_cache=False).logits[0]
    assert torch.allclose(model(input_ids=padded, use_cache=False).logits[0, :3], expected, atol=1e-12)
