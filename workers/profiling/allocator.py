"""A model of PyTorch's caching allocator that computes how much memory is reserved.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11: sizes are rounded up to 512 bytes; blocks up to
1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of
their own size rounded up to 2 MiB; the smallest free block that is large enough is taken, and split if
enough is left; free neighbours are merged. With `expandable_segments` each pool is one segment that grows by
pages of 2 or 20 MiB. The model assumes one stream and a device that never runs out of memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from workers.profiling.allocation_trace import AllocationTrace

MIB = 2**20
ROUND = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB
LARGE_ROUND = 2 * MIB


@dataclass(slots=True)
class _Piece:
    """A part of a segment; `before` and `after` are its neighbours in that segment."""

    address: int
    size: int
    small: bool
    segment: int
    free: bool = False
    before: "_Piece | None" = field(default=None, repr=False)
    after: "_Piece | None" = field(default=None, repr=False)


@dataclass
class _Pool:
    """Free pieces, the smallest first."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    pieces: dict[tuple[int, int], _Piece] = field(default_factory=dict)

    def add(self, piece: _Piece) -> None:
        key = (piece.size, piece.address)
        insort(self.keys, key)
        self.pieces[key] = piece
        piece.free = True

    def remove(self, piece: _Piece) -> None:
        key = (piece.size, piece.address)
        del self.keys[bisect_left(self.keys, key)]
        del self.pieces[key]
        piece.free = False

    def best_fit(self, size: int) -> _Piece | None:
        at = bisect_left(self.keys, (size, 0))
        return self.pieces[self.keys[at]] if at < len(self.keys) else None


class CachingAllocator:
    """Serves allocations and frees; `reserved` is the device memory that it holds, in bytes.

    Args:
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self._expandable = expandable_segments
        self._pools = {True: _Pool(), False: _Pool()}
        self._ends: dict[bool, _Piece | None] = {True: None, False: None}
        """The last piece of each pool's growing segment."""
        self._next_address = 0
        self._segments = 0

    def allocate(self, size: int) -> _Piece:
        """A piece of at least `size` bytes."""
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._pools[small]
        piece = pool.best_fit(size)
        if piece is None:
            piece = self._grow(size, small) if self._expandable else self._new_segment(size, small)
        else:
            pool.remove(piece)
        self._split(piece, size)
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece

    def free(self, piece: _Piece) -> None:
        """Frees a piece and merges it with its free neighbours."""
        self.allocated -= piece.size
        pool = self._pools[piece.small]
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                piece = self._join(piece, neighbour)
        pool.add(piece)

    def _new_segment(self, size: int, small: bool) -> _Piece:
        if small:
            whole = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // LARGE_ROUND) * LARGE_ROUND
        self._segments += 1
        return self._reserve(whole, small, self._segments)

    def _grow(self, size: int, small: bool) -> _Piece:
        """Extends the pool's only segment by whole pages, and uses the free memory at its end first."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        end = self._ends[small]
        if end is not None and end.free:
            self._pools[small].remove(end)
            missing = -(-(size - end.size) // page) * page
            end.size += missing
            self.reserved += missing
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            return end
        piece = self._reserve(-(-size // page) * page, small, -1 if small else -2)
        piece.before = end
        if end is not None:
            end.after = piece
        self._ends[small] = piece
        return piece

    def _reserve(self, size: int, small: bool, segment: int) -> _Piece:
        piece = _Piece(self._next_address, size, small, segment)
        self._next_address += 2**50 if self._expandable else size
        if self._expandable:
            end = self._ends[small]
            piece.address = end.address + end.size if end is not None else (0 if small else 2**50)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return piece

    def _split(self, piece: _Piece, size: int) -> None:
        left = piece.size - size
        if left < ROUND or not (piece.small or self._expandable or left > SMALL):
            return
        rest = _Piece(piece.address + size, left, piece.small, piece.segment, False, piece, piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after = rest
        piece.size = size
        if self._ends[piece.small] is piece:
            self._ends[piece.small] = rest
        self._pools[piece.small].add(rest)

    def _join(self, one: _Piece, other: _Piece) -> _Piece:
        first, second = (one, other) if one.address < other.address else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._ends[first.small] is second:
            self._ends[first.small] = first
        return first


def replay(trace: AllocationTrace, *, expandable_segments: bool = False) -> CachingAllocator:
    """Replays a trace, and returns the allocator in its final state."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    pieces: dict[int, _Piece] = {}
    for block, allocates in trace.events():
        size = trace.blocks[block].size
        if size and allocates:
            pieces[block] = allocator.allocate(size)
        elif size:
            allocator.free(pieces.pop(block))
    return allocator
