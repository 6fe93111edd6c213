"""The model of PyTorch's caching allocator, against its documented rules."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.profiling.allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_have_the_documented_sizes(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert allocator.allocated == 512 + 1024


def test_freed_memory_is_reused() -> None:
    allocator = CachingAllocator()
    for _ in range(10):
        allocator.free(allocator.allocate(30 * MIB))
    assert allocator.reserved == 30 * MIB


def test_free_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for piece in pieces:
        allocator.free(piece)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_fragments_cost_reserved_memory_unless_segments_expand() -> None:
    def grown(allocator: CachingAllocator) -> int:
        for size in range(20, 60, 2):
            allocator.free(allocator.allocate(size * MIB))
        return allocator.reserved

    assert grown(CachingAllocator()) == sum(size * MIB for size in range(20, 60, 2))
    assert grown(CachingAllocator(expandable_segments=True)) == 60 * MIB


@given(seed=st.integers(0, 10_000), expandable=st.booleans())
def test_allocated_equals_live_bytes_and_reserved_is_never_smaller(seed: int, expandable: bool) -> None:
    chance = random.Random(seed)
    allocator, held, total = CachingAllocator(expandable_segments=expandable), [], 0
    for _ in range(200):
        if held and chance.random() < 0.45:
            piece = held.pop(chance.randrange(len(held)))
            total -= piece.size
            allocator.free(piece)
        else:
            piece = allocator.allocate(int(2 ** chance.uniform(4, 27)))
            held.append(piece)
            total += piece.size
        assert allocator.allocated == total
        assert allocator.reserved >= total
    for piece in held:
        allocator.free(piece)
    assert allocator.allocated == 0
