"""Which micro-batch is fast enough: throughput as it was measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.contract.memory_profile import Recipe
from app.contract.reports import smallest_of_the_fastest
from app.planning.interpolation import interpolated

CPU_TOKENS = 512
"""A CPU's throughput no longer grows with the micro-batch beyond about five hundred tokens (CONTRIBUTING):
this goes for a model of which no two sizes were measured on it."""


@dataclass(frozen=True)
class Throughput:
    """Tokens per second, padding not counted, by the tokens of a micro-batch: of one sweep on one device."""

    points: tuple[tuple[int, float], ...]
    """Pairs of tokens and speed by increasing tokens; at least one."""

    @property
    def saw_the_end(self) -> bool:
        """Whether throughput stopped growing within the measured sizes."""
        return len(self.points) > 1 and smallest_of_the_fastest(self.points) < self.points[-1][0]

    def at(self, tokens: int) -> float:
        """The rate at a size: between two that were measured, on the line; beyond them, the nearer one's."""
        return interpolated(self.points, tokens)

    def useful(self, most: int) -> int:
        """The size beyond which throughput does not grow, of those measured; `most`, which is what memory
        allows, where none is so small."""
        allowed = [point for point in self.points if point[0] <= most]
        return smallest_of_the_fastest(allowed) if allowed else most


def useful_tokens(measured: Throughput | None, device: Literal["cpu", "cuda"], most: int) -> int:
    """Tokens of a micro-batch beyond which throughput does not grow.

    A single size says nothing of others; nor does a sweep that was fastest at its largest say where it ends.

    Args:
        most: what memory allows.
    """
    fastest = 0
    if measured is not None and len(measured.points) > 1:
        fastest = measured.useful(most)
        if measured.saw_the_end:
            return fastest
    return min(most, max(CPU_TOKENS, fastest)) if device == "cpu" else most


ThroughputOf = Callable[[Recipe, int], Throughput | None]
"""The measured throughput of a recipe and a sequence length on the device; None: there is none."""


def unmeasured(recipe: Recipe, sequence: int) -> None:
    """Where nothing was measured."""
