"""A tape: what a training step allocates and frees, in order, and what each block is for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from app.contract.memory_profile import KINDS, Kind


@dataclass
class Block:
    """One allocation."""

    size: int
    """Bytes, as the operator asked for them."""
    kind: Kind
    group: int | None
    """The group of layers in whose part of the step it was made; None: outside of the layers."""


class Place(NamedTuple):
    """A stretch of the step: a pass over the model, or its end, and the group of layers at work."""

    phase: str
    group: int | None


class Event(NamedTuple):
    """A block comes to life, or its life ends."""

    block: int
    allocates: bool


@dataclass
class Run:
    """Events in a row at one place."""

    place: Place
    events: list[Event] = field(default_factory=list)


@dataclass
class Tape:
    """Blocks by number, and the runs in which they come and go."""

    blocks: list[Block] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def allocate(self, place: Place, size: int, kind: Kind) -> int:
        """A new block's number."""
        self.blocks.append(Block(size, kind, place.group))
        number = len(self.blocks) - 1
        self._add(place, Event(number, True))
        return number

    def free(self, place: Place, block: int) -> None:
        self._add(place, Event(block, False))

    def takes_back(self, block: int) -> bool:
        """Whether a block's allocation was the last event; then it is as if it had never been."""
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


def peaks(tape: Tape) -> list[Peak]:
    """Each run's peak, in order. The first events of a run come on top of what is live before it."""
    live = dict.fromkeys(KINDS, 0)
    total, found = 0, []
    for run in tape.runs:
        highest, at_highest = total, dict(live)
        for block, allocates in run.events:
            own = tape.blocks[block]
            change = own.size if allocates else -own.size
            live[own.kind] += change
            total += change
            if total > highest:
                highest, at_highest = total, dict(live)
        found.append(Peak(run.place, highest, at_highest))
    return found
