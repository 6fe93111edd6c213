"""The samples of a packed row are padded in groups for attention, and moved back without a trace."""

import numpy as np
import pytest
import torch

from workers.training.kernels import sample_groups
from workers.training.kernels.sample_groups import SampleGroups, groups_of, pad, unpad

MIXES = {
    "one sample": [9],
    "equal lengths": [50] * 7,
    "two kinds": [30, 900, 31, 880, 29],
    "like Alpaca's": np.random.default_rng(1).lognormal(np.log(76), 0.6, 60).astype(int).tolist(),
    "samples of one token": [1, 1, 700, 1],
}
EACH_MIX = pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)


@EACH_MIX
@pytest.mark.parametrize("heads", [1, 3])
def test_each_sample_has_a_row_that_begins_with_its_tokens(lengths: list[int], heads: int) -> None:
    groups = SampleGroups(np.array(lengths))
    tokens = torch.arange(sum(lengths), dtype=torch.float64)
    states = torch.stack([tokens * 10 + head for head in range(heads)], dim=1)[..., None]
    sample = np.repeat(np.arange(len(lengths)), lengths)
    found = []
    for part in pad(states, groups):
        for row in part[..., 0].numpy():
            [own] = set(sample[(row // 10).astype(int)].ravel().tolist())  # padding is the same sample's
            found.append(own)
            first = sum(lengths[:own])
            expected = (first + np.arange(lengths[own])) * 10 + np.arange(heads)[:, None]
            assert (row[:, : lengths[own]] == expected).all()
    assert sorted(found) == list(range(len(lengths)))
    assert torch.equal(unpad(pad(states, groups), groups), states)


@EACH_MIX
def test_no_other_division_into_groups_costs_less(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_groups, "_COST_OF_GROUP", 100.0)
    ordered = np.sort(lengths)[-8:][::-1]
    costs = []
    for mask in range(2 ** (len(ordered) - 1)):
        cuts = [i + 1 for i in range(len(ordered) - 1) if mask >> i & 1]
        costs.append(sum(100.0 + len(part) * int(part[0]) for part in np.split(ordered, cuts)))
    shapes = SampleGroups(ordered).shapes
    assert sum(100.0 + samples * longest for samples, longest in shapes) == min(costs)


def test_samples_of_other_lengths_are_in_other_groups() -> None:
    assert SampleGroups(np.array(MIXES["two kinds"])).shapes == ((2, 900), (3, 31))


def test_groups_are_determined_once_for_each_row() -> None:
    begins = torch.tensor([0, 5, 14], dtype=torch.int32)
    assert groups_of(begins) is groups_of(begins)
    assert groups_of(begins) is not groups_of(begins.clone())


@EACH_MIX
def test_gradients_are_those_of_indexing(lengths: list[int]) -> None:
    groups, random = SampleGroups(np.array(lengths)), torch.Generator().manual_seed(3)
    states = torch.randn(sum(lengths), 2, 3, generator=random, dtype=torch.float64, requires_grad=True)
    outer = torch.randn(sum(lengths), 2, 3, generator=random, dtype=torch.float64)
    factors = [torch.randn(part.shape, generator=random, dtype=torch.float64) for part in pad(states, groups)]
    ours = unpad([part * by for part, by in zip(pad(states, groups), factors, strict=True)], groups)
    by_token = unpad(factors, groups)
    assert torch.equal(ours, states * by_token)
    [found] = torch.autograd.grad(ours, states, outer)
    assert torch.equal(found, outer * by_token)
