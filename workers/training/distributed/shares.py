"""How much of each window each rank takes: by the plan first, then by measured speed.

A window takes as long as its slowest rank. So the time that each rank needs for its part is measured, and
ranks that finish early get a larger part from then on. All ranks calculate the same shares from the same
measurements. Each change is recorded, so that an attempt that repeats windows divides them as before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.training.checkpoints.state import LearnedShares

LONGEST_PERIOD = 32
"""Each period is twice as long as the one before, up to this number of windows."""

WORTH_CHANGING = 0.03
"""Shares change only if some rank is expected to wait for longer than this share of the window."""

_GROWTH_WITHOUT_WORK = 1.5
"""A rank that got no sample in a whole period could not be measured. Its share then grows by this factor, so
that it gets samples again at some time, but never beyond the share of the fastest rank: with fewer samples
than ranks, some rank always gets none."""


@dataclass(frozen=True)
class WindowWork:
    """What one rank did in a window."""

    micro_batches: int
    samples: int
    tokens: int
    """Tokens of its samples, without padding."""
    cost: float
    """What its micro-batches cost, in tokens, as it is counted when samples are divided (`Budget.cost`)."""
    padded_tokens: int
    seconds: float
    """Seconds of its device from the first micro-batch to the end of the last one."""
    data_seconds: float
    """Seconds of these in which it waited for its data."""
    peak_bytes: int
    """The most memory that its device has held since the start of the process; 0 if not known."""


class Shares:
    """Each rank's share of a window's tokens.

    Args:
        planned: the plan's shares, by rank. A share of 0 is replaced by the smallest other one: with
            full-length samples that rank gets none, but with shorter ones it may get some.
        learned: what was learned from measurements, which checkpoints keep; changed in place.
        adapts: whether measurements change the shares.
        recorded: changes that earlier attempts made, by the step after which they made them.
        until: the last step that an earlier attempt has made; up to it, only recorded changes are made.
    """

    def __init__(
        self,
        planned: Sequence[float],
        learned: LearnedShares,
        *,
        adapts: bool,
        recorded: Mapping[int, Sequence[float]],
        until: int,
    ) -> None:
        least = min((share for share in planned if share > 0), default=1.0)
        self._planned = [share or least for share in planned]
        self._learned, self._adapts = learned, adapts
        self._recorded, self._until = recorded, until
        self._is_warm = False
        if any(len(own) not in (0, len(planned)) for own in (learned.shares, learned.tokens)):
            learned.use([])  # it was of another number of ranks

    @property
    def now(self) -> list[float]:
        """The shares of the next window."""
        return self._learned.shares or self._planned

    def record_window(self, step: int, work: Sequence[WindowWork]) -> list[float] | None:
        """Takes a window into account.

        Args:
            step: optimizer steps made, including this window's.
            work: what each rank did.

        Returns:
            The new shares if they have changed, and the change is to be recorded; None otherwise.
        """
        learned = self._learned
        if not self._adapts or len(work) == 1:
            return None
        if step <= self._until:
            recorded = self._recorded.get(step)
            if recorded is not None and len(recorded) == len(work):
                learned.use(recorded)
            return None
        if not self._is_warm:  # the first window also loads libraries and chooses kernels
            self._is_warm = True
            return None
        learned.add([each.cost for each in work], [each.seconds for each in work])
        if learned.windows < learned.period:
            return None
        shares = by_speed(self.now, learned.tokens, learned.seconds)
        learned.start_period(min(2 * learned.period, LONGEST_PERIOD))
        if waiting(self.now, shares) <= WORTH_CHANGING:
            return None
        learned.shares = shares
        return shares


def by_speed(shares: Sequence[float], tokens: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Shares in proportion to measured speeds; they add up to 1.

    Args:
        shares: the shares that were in use during the measurement.
        tokens: the cost of what each rank processed, in tokens (`WindowWork.cost`).
        seconds: how long it took for them. A rank without tokens keeps its share, relative to the others,
            and a bit more if others are faster.
    """
    speeds = [done / took if done and took else None for done, took in zip(tokens, seconds, strict=True)]
    measured = [(speed, share) for speed, share in zip(speeds, shares, strict=True) if speed is not None]
    if not measured:
        return list(shares)
    fastest = max(speed for speed, _ in measured)
    per_share = sum(speed for speed, _ in measured) / sum(share for _, share in measured)

    def expected(share: float) -> float:
        """The speed of a rank without work."""
        same = share * per_share
        return max(same, min(same * _GROWTH_WITHOUT_WORK, fastest))

    found = [expected(share) if speed is None else speed for speed, share in zip(speeds, shares, strict=True)]
    return [each / sum(found) for each in found]


def waiting(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """The share of a window for which the fastest rank waits for the slowest, if they take these shares."""
    seconds = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    return 1 - min(seconds) / max(seconds)
