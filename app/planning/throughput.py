"""Measured throughput, and the micro-batch beyond which it no longer grows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.contract.memory_profile import Recipe
from app.contract.reports import smallest_of_the_fastest
from app.planning.interpolation import interpolated

CPU_TOKENS = 512
"""Beyond about this many tokens, a CPU's throughput no longer grows with the micro-batch (CONTRIBUTING.md).
Used for a model unless a tuning run has found the size beyond which throughput does not grow; narrow models
take more (`cpu_tokens`)."""

UNPADDED_CPU_TOKENS = 768
"""The budget on a CPU if samples are not padded, for models that otherwise take `CPU_TOKENS`. Without
padding, the trainer needs no more memory with this many tokens than transformers' own layers need with
`CPU_TOKENS` and padding, and is 1.02 to 1.13 times as fast as with `CPU_TOKENS` (CONTRIBUTING.md)."""

_TOO_WIDE = 1024
"""From this width on, a CPU is not faster with `UNPADDED_CPU_TOKENS`."""

_WIDE_ENOUGH = 181
_MOST_CPU_TOKENS = 2048


def cpu_tokens(hidden_size: int | None) -> int:
    """`CPU_TOKENS` for a model of this width; None: not known.

    The narrower a model, the larger a micro-batch's fixed time is relative to its tokens' time, since matrix
    products grow with the square of the width. So the budget falls with that square, from `_MOST_CPU_TOKENS`
    at a width of 90. It is measured at widths of 64 (2,048 tokens), 128 (1,024) and 256 to 768 (512), and
    assumed in between (CONTRIBUTING.md).
    """
    if hidden_size is None:
        return CPU_TOKENS
    return round(min(_MOST_CPU_TOKENS, CPU_TOKENS * max(1.0, (_WIDE_ENOUGH / max(1, hidden_size)) ** 2)))


@dataclass(frozen=True)
class Throughput:
    """Tokens per second without padding, by the tokens of a micro-batch, from one tuning run on one
    device."""

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


def useful_tokens(
    measured: Throughput | None,
    device: Literal["cpu", "cuda"],
    most: int,
    hidden_size: int | None = None,
) -> int:
    """Tokens of a micro-batch beyond which throughput does not grow.

    One size shows no trend, and a tuning run whose largest size was fastest does not show where growth ends.

    Args:
        most: what memory allows.
        hidden_size: the model's width; None if it is not known.
    """
    fastest = 0
    if measured is not None and len(measured.points) > 1:
        fastest = measured.useful(most)
        if measured.reached_plateau:
            return fastest
    return min(most, max(cpu_tokens(hidden_size), fastest)) if device == "cpu" else most


def unpadded_tokens(
    measured: Throughput | None, device: Literal["cpu", "cuda"], most: int, hidden_size: int | None
) -> int | None:
    """Tokens of a micro-batch without padding beyond which throughput does not grow; None if they are no more
    than with padding, or if sizes were measured.

    Args:
        most: what memory allows with padding.
        hidden_size: the model's width; None if it is not known.
    """
    is_measured = measured is not None and len(measured.points) > 1
    if device != "cpu" or is_measured or hidden_size is None or hidden_size >= _TOO_WIDE:
        return None
    found = min(most, UNPADDED_CPU_TOKENS)
    return found if found > cpu_tokens(hidden_size) else None


ThroughputOf = Callable[[Recipe, int], Throughput | None]
"""The measured throughput of a recipe and a sequence length on the device; None: there is none."""


def unmeasured(recipe: Recipe, sequence: int) -> None:
    """The `ThroughputOf` if nothing was measured."""
