"""Turns the tape of a shallow model into that of the deep one, by repeating a group of layers.

The shallow model has four groups of layers: first, two alike, last. If the two in the middle do the same,
allocation for allocation, the deep model does just that once more for each group that it has more: the
tape of the third group is repeated, forward in one order and backward in the other. What a group frees of
its neighbours' (the activations between two layers) is found by what the group before it does with its
own neighbours. Nothing is estimated; where the groups differ, the tape says so.
"""

from dataclasses import dataclass, field

from workers.profiling.tape import Block, Event, Run, Tape

FIRST, BEFORE, REPEATED, LAST = range(4)
GROUPS = 4


class NotUniform(Exception):
    """The groups in the middle do not do the same: the model has to be traced at its full depth."""


def unroll(tape: Tape, copies: int) -> Tape:
    """The tape with the third of its four groups `copies` times.

    Raises:
        NotUniform: the second and the third group differ.
    """
    twins = _twins(tape)
    freed_in = {
        event.block: run.place.group for run in tape.runs for event in run.events if not event.allocates
    }
    unrolled = _Unrolled(tape, copies, twins, freed_in)
    befores: dict[str, list[Run]] = {}
    repeats: dict[str, list[Run]] = {}
    for run in tape.runs:
        if run.place.group == BEFORE:
            befores.setdefault(run.place.phase, []).append(run)
        elif run.place.group == REPEATED:
            repeats.setdefault(run.place.phase, []).append(run)
    pairs = {
        id(run): before
        for phase, runs in repeats.items()
        for run, before in zip(runs, befores.get(phase, []), strict=True)
    }
    for run in tape.runs:
        if run.place.group == REPEATED:
            unrolled.repeat(run, pairs[id(run)])
        else:
            unrolled.keep(run)
    return unrolled.tape


def _twins(tape: Tape) -> dict[int, int]:
    """For each block of the second group, the third's that corresponds to it.

    Raises:
        NotUniform: there is none, or it is of another size.
    """
    runs: dict[tuple[str, int], list[Run]] = {}
    for run in tape.runs:
        if run.place.group in (BEFORE, REPEATED):
            runs.setdefault((run.place.phase, run.place.group), []).append(run)
    twins: dict[int, int] = {}
    for phase in {phase for phase, _ in runs}:
        before, repeated = runs.get((phase, BEFORE), []), runs.get((phase, REPEATED), [])
        if [len(run.events) for run in before] != [len(run.events) for run in repeated]:
            raise NotUniform(f"{phase}: the groups make another number of allocations")
        for one, other in zip(before, repeated, strict=True):
            for a, b in zip(one.events, other.events, strict=True):
                if a.allocates != b.allocates:
                    raise NotUniform(f"{phase}: the groups allocate in another order")
                if a.allocates and not _alike(tape.blocks[a.block], tape.blocks[b.block]):
                    raise NotUniform(f"{phase}: the groups allocate other sizes")
                if a.allocates:
                    twins[a.block] = b.block
    return twins


def _alike(one: Block, other: Block) -> bool:
    return (one.size, one.kind) == (other.size, other.kind)


@dataclass
class _Unrolled:
    """The longer tape in the making."""

    source: Tape
    copies: int
    twins: dict[int, int]
    freed_in: dict[int, int | None]
    tape: Tape = field(default_factory=Tape)
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """A block's number on the new tape, by its number on the source tape and its copy."""

    def __post_init__(self) -> None:
        self._originals = {twin: original for original, twin in self.twins.items()}

    def keep(self, run: Run) -> None:
        """A run that happens once, however deep the model is."""
        events: list[Event] = []
        for block, allocates in run.events:
            if allocates:
                events.append(self._new(block, 0))
            elif self.source.blocks[block].group == REPEATED:
                events.extend(self._old(block, copy) for copy in self._copies_freed(block, run))
            else:
                events.append(self._old(block, 0))
        self.tape.runs.append(Run(run.place, events))

    def repeat(self, run: Run, before: Run) -> None:
        """A run that happens once for each copy; `before` is the second group's that corresponds."""
        order = range(self.copies)
        for copy in reversed(order) if run.place.phase.startswith("backward") else order:
            events = [
                self._new(event.block, copy)
                if event.allocates
                else self._freed(event.block, other.block, copy)
                for event, other in zip(run.events, before.events, strict=True)
            ]
            self.tape.runs.append(Run(run.place, events))

    def _freed(self, block: int, others: int, copy: int) -> Event:
        """What the copy frees where the third group frees `block`, and the second `others`."""
        owner = self.source.blocks[block].group
        if owner == REPEATED:
            return self._old(block, copy)
        if owner == BEFORE:
            return self._old(block, 0) if copy == 0 else self._old(self._twin(block), copy - 1)
        if owner == LAST:
            return self._old(block, 0) if copy == self.copies - 1 else self._old(others, copy + 1)
        raise NotUniform("a group in the middle frees what belongs to none of its neighbours")

    def _copies_freed(self, block: int, run: Run) -> range:
        """The copies whose block is freed by a run outside of the copies."""
        twin_freed_in = self.freed_in.get(self._original(block))
        if twin_freed_in == REPEATED:  # each by the group above it: what is left is the last one's
            return range(self.copies - 1, self.copies)
        if run.place.group == BEFORE and twin_freed_in == FIRST:  # each by the group below it
            return range(1)
        return range(self.copies)

    def _twin(self, block: int) -> int:
        if block not in self.twins:
            raise NotUniform("a block that passes between two groups has no counterpart")
        return self.twins[block]

    def _original(self, block: int) -> int:
        if block not in self._originals:
            raise NotUniform("a block of the third group has no counterpart in the second")
        return self._originals[block]

    def _new(self, block: int, copy: int) -> Event:
        self.tape.blocks.append(self.source.blocks[block])
        number = len(self.tape.blocks) - 1
        self._numbers[block, copy] = number
        return Event(number, True)

    def _old(self, block: int, copy: int) -> Event:
        if (block, copy) not in self._numbers:
            raise NotUniform("a block is freed that was never made")
        return Event(self._numbers[block, copy], False)
