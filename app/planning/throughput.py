"""Measured throughput, and the micro-batch beyond which it no longer grows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.contract.memory_profile import Recipe
from app.contract.reports import smallest_of_the_fastest
from app.planning.interpolation import interpolated

CPU_TOKENS = 512
"""Beyond about this many tokens, a CPU's throughput no longer grows with the micro-batch (CONTRIBUTING.md).
Used for a model unless two or more sizes were measured on the CPU."""


@dataclass(frozen=True)
class Throughput:
    """Tokens per second without padding, by the tokens of a micro-batch, from one sweep on one device."""

    points: tuple[tuple[int, float], ...]
    """Pairs of tokens and speed by increasing tokens; at least one."""

    @property
    def reached_plateau(self) -> bool:
        """Whether throughput stopped growing within the measured sizes."""
        return len(self.points) > 1 and smallest_of_the_fastest(self.points) < self.points[-1][0]

    def at(self, tokens: int) -> float:
        """The rate at a size, interpolated linearly; beyond the measured sizes, that of the nearest one."""
        return interpolated(self.points, tokens)

    def useful(self, most: int) -> int:
        """Of the measured sizes up to `most`, the smallest beyond which throughput does not grow; `most`
        itself if every measured size is larger. Memory allows up to `most` tokens."""
        allowed = [point for point in self.points if point[0] <= most]
        return smallest_of_the_fastest(allowed) if allowed else most


def useful_tokens(measured: Throughput | None, device: Literal["cpu", "cuda"], most: int) -> int:
    """Tokens of a micro-batch beyond which throughput does not grow.

    One size shows no trend, and a sweep whose largest size was fastest does not show where growth ends.

    Args:
        most: what memory allows.
    """
    fastest = 0
    if measured is not None and len(measured.points) > 1:
        fastest = measured.useful(most)
        if measured.reached_plateau:
            return fastest
    return min(most, max(CPU_TOKENS, fastest)) if device == "cpu" else most


ThroughputOf = Callable[[Recipe, int], Throughput | None]
"""The measured throughput of a recipe and a sequence length on the device; None: there is none."""


def unmeasured(recipe: Recipe, sequence: int) -> None:
    """The `ThroughputOf` if nothing was measured."""
