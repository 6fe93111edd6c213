"""Which micro-batch is fast enough: throughput as it was measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.planning.interpolation import interpolated
from app.schemas.profile import Recipe

AS_FAST = 0.97
"""A micro-batch this close to the fastest counts as fast as it: the leanest of those is taken."""


def leanest(measured: Iterable[tuple[int, float]]) -> int:
    """The smallest size whose rate is as good as the best; of (tokens, rate) pairs, at least one."""
    pairs = list(measured)
    best = max(rate for _, rate in pairs)
    return min(tokens for tokens, rate in pairs if rate >= AS_FAST * best)


@dataclass(frozen=True)
class Speeds:
    """Tokens per second, padding not counted, by the tokens of a micro-batch: of one sweep on one device."""

    points: tuple[tuple[int, float], ...]
    """By rising tokens; at least one."""

    def at(self, tokens: int) -> float:
        """The rate at a size: between two that were measured, on the line; beyond them, the nearer one's."""
        return interpolated(self.points, tokens)

    def useful(self, most: int) -> int:
        """The size beyond which throughput does not grow, of those measured; `most`, which is what memory
        allows, where one size alone was measured, or none so small."""
        allowed = [point for point in self.points if point[0] <= most]
        return leanest(allowed) if len(self.points) > 1 and allowed else most


SpeedsOf = Callable[[Recipe, int], Speeds | None]
"""What was measured with a recipe and a length of sequence on the device at hand; null: nothing."""


def unmeasured(recipe: Recipe, sequence: int) -> None:
    """Where nothing was measured."""
