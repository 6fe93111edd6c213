"""An allocation trace: what a training step allocates and frees, in order, and what each block is for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from app.contract.memory_profile import KINDS, Kind


@dataclass
class Block:
    """One allocation."""

    size: int
    """Bytes, as requested by the operator."""
    kind: Kind
    group: int | None
    """The group of layers that made the allocation, or None outside of the layers."""


class Place(NamedTuple):
    """A part of the step: its phase (a pass over the model, or the close of the window) and the group of
    layers."""

    phase: str
    group: int | None


class Event(NamedTuple):
    """A block is allocated or freed."""

    block: int
    allocates: bool


@dataclass
class Run:
    """Consecutive events at one place."""

    place: Place
    events: list[Event] = field(default_factory=list)


@dataclass
class AllocationTrace:
    """Blocks by number, and the runs of events that allocate and free them."""

    blocks: list[Block] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def allocate(self, place: Place, size: int, kind: Kind) -> int:
        """Records an allocation. Returns the new block's number."""
        self.blocks.append(Block(size, kind, place.group))
        number = len(self.blocks) - 1
        self._add(place, Event(number, True))
        return number

    def free(self, place: Place, block: int) -> None:
        self._add(place, Event(block, False))

    def undo_last(self, block: int) -> bool:
        """Undoes a block's allocation if it was the last event. Returns whether it was."""
        if block != len(self.blocks) - 1 or not self.runs or self.runs[-1].events[-1] != Event(block, True):
            return False
        self.blocks.pop()
        self.runs[-1].events.pop()
        if not self.runs[-1].events:
            self.runs.pop()
        return True

    def events(self) -> Iterator[Event]:
        for run in self.runs:
            yield from run.events

    def _add(self, place: Place, event: Event) -> None:
        if not self.runs or self.runs[-1].place != place:
            self.runs.append(Run(place))
        self.runs[-1].events.append(event)


@dataclass(frozen=True)
class Peak:
    """The most bytes live during one run, and what they were for."""

    place: Place
    bytes: int
    by_kind: dict[Kind, int]


def peaks(trace: AllocationTrace) -> list[Peak]:
    """Each run's peak, in order. A run starts with the memory that is live before it."""
    live = dict.fromkeys(KINDS, 0)
    total, found = 0, []
    for run in trace.runs:
        highest, at_highest = total, dict(live)
        for block, allocates in run.events:
            own = trace.blocks[block]
            change = own.size if allocates else -own.size
            live[own.kind] += change
            total += change
            if total > highest:
                highest, at_highest = total, dict(live)
        found.append(Peak(run.place, highest, at_highest))
    return found
