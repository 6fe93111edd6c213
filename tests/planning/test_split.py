import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.planning.split import (
    ConflictingBatch,
    RequestedBatch,
    ResolvedBatch,
    even,
    resolve,
    split_over,
    without_accumulation,
)


@pytest.mark.parametrize(
    ("requested", "resolved"),
    [
        (RequestedBatch(64, None, None), ResolvedBatch(64, None, None)),
        (RequestedBatch(64, 8, None), ResolvedBatch(64, 8, None)),
        (RequestedBatch(64, None, 8, 2), ResolvedBatch(64, None, 8)),
        (RequestedBatch(None, 4, 8, 2), ResolvedBatch(64, 4, 8)),
        (RequestedBatch(None, 4, None, 2), ResolvedBatch(64, 4, None)),
        (RequestedBatch(None, None, 8, 2), ResolvedBatch(16, 1, 8)),
        (RequestedBatch(None, None, None), ResolvedBatch(32, None, None)),
        (RequestedBatch(30, 4, 8), ResolvedBatch(30, 4, 8)),
    ],
)
def test_the_three_numbers_resolve_as_documented(requested: RequestedBatch, resolved: ResolvedBatch) -> None:
    assert resolve(requested, recommended=32) == resolved


def test_inconsistent_batch_numbers_are_rejected_with_the_consistent_one() -> None:
    with pytest.raises(ConflictingBatch, match="takes 4 accumulation steps, not 3"):
        resolve(RequestedBatch(30, 3, 8), recommended=32)


def test_without_accumulation_one_micro_batch_is_the_step() -> None:
    assert without_accumulation(RequestedBatch(None, None, 8, 2), 32) == ResolvedBatch(16, 1, 8)
    assert without_accumulation(RequestedBatch(None, None, None), 32) == ResolvedBatch(32, 1, 32)
    with pytest.raises(ConflictingBatch, match="use_gradient_accumulation is false"):
        without_accumulation(RequestedBatch(64, None, 8), 32)
    with pytest.raises(ConflictingBatch, match="use_gradient_accumulation is false"):
        without_accumulation(RequestedBatch(64, 8, None), 32)


def test_known_splits() -> None:
    assert [own.sizes() for own in split_over(30, [8])] == [[8, 8, 7, 7]]
    assert [len(own) for own in split_over(256, [40])] == [7]
    assert sum(sum(own.sizes()) for own in split_over(256, [40])) == 256


@given(
    target=st.integers(1, 100_000),
    capacities=st.lists(st.integers(1, 5000), min_size=1, max_size=16),
)
def test_a_split_is_exact_fits_and_has_the_fewest_steps(target: int, capacities: list[int]) -> None:
    split = [own.sizes() for own in split_over(target, capacities)]
    assert sum(map(sum, split)) == target
    assert all(size <= capacity for own, capacity in zip(split, capacities, strict=True) for size in own)
    assert all(size >= 1 for own in split for size in own)
    assert max(map(len, split)) == -(-target // sum(capacities))
    assert all(max(own) - min(own) <= 1 for own in split if own)


@given(samples=st.integers(0, 10_000), parts=st.integers(1, 500))
def test_even_parts_differ_by_at_most_one(samples: int, parts: int) -> None:
    sizes = even(samples, parts).sizes()
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, parts)
    assert sorted(sizes, reverse=True) == sizes
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(
    samples=st.integers(0, 10_000),
    parts=st.integers(1, 500),
    places=st.builds(slice, st.integers(0, 600), st.none() | st.integers(0, 600), st.integers(1, 9)),
)
def test_chosen_micro_batches_are_those_of_the_list(samples: int, parts: int, places: slice) -> None:
    whole = even(samples, parts)
    assert whole.chosen(places).sizes() == whole.sizes()[places]
    assert whole.largest == max(whole.sizes(), default=0)
    assert whole.smallest == min(whole.sizes(), default=0)


def test_a_million_micro_batches_take_no_time() -> None:
    began = time.process_time()
    for _ in range(1000):
        split_over(10**6, [1] * 8)
    assert time.process_time() - began < 5
