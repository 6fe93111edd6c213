"""Turns the trace of a shallow model into that of the deep one, by repeating a group of layers.

The shallow model has four groups of layers: the first, two equal ones, and the last. If the two in the middle
make the same allocations, every further group of the deep model makes them too: the trace of the third group
is repeated, in one order in the forward pass and in reverse in the backward pass. Which blocks of its
neighbours a copy frees (the activations between two layers) is known from what the second group frees of its
own neighbours. Nothing is estimated: if the groups differ, NotUniform is raised.
"""

from dataclasses import dataclass, field

from workers.profiling.allocation_trace import AllocationTrace, Block, Event, Run

FIRST, BEFORE, REPEATED, LAST = range(4)
GROUPS = 4


class NotUniform(Exception):
    """The middle groups make different allocations: the model has to be traced at its full depth."""


def unroll(trace: AllocationTrace, copies: int) -> AllocationTrace:
    """Repeats the third of a trace's four groups `copies` times.

    Raises:
        NotUniform: the second and the third group differ.
    """
    twins = _twins(trace)
    freed_in = {
        event.block: run.place.group for run in trace.runs for event in run.events if not event.allocates
    }
    unrolled = _Unrolled(trace, copies, twins, freed_in)
    befores: dict[str, list[Run]] = {}
    repeats: dict[str, list[Run]] = {}
    for run in trace.runs:
        if run.place.group == BEFORE:
            befores.setdefault(run.place.phase, []).append(run)
        elif run.place.group == REPEATED:
            repeats.setdefault(run.place.phase, []).append(run)
    pairs = {
        id(run): before
        for phase, runs in repeats.items()
        for run, before in zip(runs, befores.get(phase, []), strict=True)
    }
    for run in trace.runs:
        if run.place.group == REPEATED:
            unrolled.repeat(run, pairs[id(run)])
        else:
            unrolled.keep(run)
    return unrolled.trace


def _twins(trace: AllocationTrace) -> dict[int, int]:
    """Maps each block of the second group to the corresponding block of the third.

    Raises:
        NotUniform: a block has no counterpart, or one of another size.
    """
    runs: dict[tuple[str, int], list[Run]] = {}
    for run in trace.runs:
        if run.place.group in (BEFORE, REPEATED):
            runs.setdefault((run.place.phase, run.place.group), []).append(run)
    twins: dict[int, int] = {}
    for phase in {phase for phase, _ in runs}:
        before, repeated = runs.get((phase, BEFORE), []), runs.get((phase, REPEATED), [])
        if [len(run.events) for run in before] != [len(run.events) for run in repeated]:
            raise NotUniform(f"{phase}: the groups make different numbers of allocations")
        for one, other in zip(before, repeated, strict=True):
            for a, b in zip(one.events, other.events, strict=True):
                if a.allocates != b.allocates:
                    raise NotUniform(f"{phase}: the groups allocate in different orders")
                if a.allocates and not _alike(trace.blocks[a.block], trace.blocks[b.block]):
                    raise NotUniform(f"{phase}: the groups allocate different sizes")
                if a.allocates:
                    twins[a.block] = b.block
    return twins


def _alike(one: Block, other: Block) -> bool:
    return (one.size, one.kind) == (other.size, other.kind)


@dataclass
class _Unrolled:
    """Builds the longer trace."""

    source: AllocationTrace
    copies: int
    twins: dict[int, int]
    freed_in: dict[int, int | None]
    trace: AllocationTrace = field(default_factory=AllocationTrace)
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """A block's number in the new trace, by its number in the source trace and its copy."""

    def __post_init__(self) -> None:
        self._originals = {twin: original for original, twin in self.twins.items()}

    def keep(self, run: Run) -> None:
        """Adds a run that happens once, however deep the model is."""
        events: list[Event] = []
        for block, allocates in run.events:
            if allocates:
                events.append(self._new(block, 0))
            elif self.source.blocks[block].group == REPEATED:
                events.extend(self._old(block, copy) for copy in self._copies_freed(block, run))
            else:
                events.append(self._old(block, 0))
        self.trace.runs.append(Run(run.place, events))

    def repeat(self, run: Run, before: Run) -> None:
        """Adds a run once for each copy; `before` is the corresponding run of the second group."""
        order = range(self.copies)
        for copy in reversed(order) if run.place.phase.startswith("backward") else order:
            events = [
                self._new(event.block, copy)
                if event.allocates
                else self._freed(event.block, other.block, copy)
                for event, other in zip(run.events, before.events, strict=True)
            ]
            self.trace.runs.append(Run(run.place, events))

    def _freed(self, block: int, counterpart: int, copy: int) -> Event:
        """The block that a copy frees where the third group frees `block` and the second group frees
        `counterpart`."""
        owner = self.source.blocks[block].group
        if owner == REPEATED:
            return self._old(block, copy)
        if owner == BEFORE:
            return self._old(block, 0) if copy == 0 else self._old(self._twin(block), copy - 1)
        if owner == LAST:
            return self._old(block, 0) if copy == self.copies - 1 else self._old(counterpart, copy + 1)
        raise NotUniform("a middle group frees a block that belongs to none of its neighbours")

    def _copies_freed(self, block: int, run: Run) -> range:
        """The copies whose block is freed by a run outside of the copies."""
        twin_freed_in = self.freed_in.get(self._original(block))
        if twin_freed_in == REPEATED:  # each copy's block is freed by the next copy, except the last copy's
            return range(self.copies - 1, self.copies)
        if (
            run.place.group == BEFORE and twin_freed_in == FIRST
        ):  # each copy's block is freed by the copy before it, except the first's
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
        self.trace.blocks.append(self.source.blocks[block])
        number = len(self.trace.blocks) - 1
        self._numbers[block, copy] = number
        return Event(number, True)

    def _old(self, block: int, copy: int) -> Event:
        if (block, copy) not in self._numbers:
            raise NotUniform("a block is freed that was never allocated")
        return Event(self._numbers[block, copy], False)
