"""Exceptions of a run: `CannotTrain` has a message for the user; the others tell ranks and the supervisor
how to go on."""


class CannotTrain(Exception):
    """The job as it stands cannot be trained, and would fail the same way again.

    The message says what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Interrupted(Exception):
    """The trainer was interrupted; the next attempt continues from what was saved."""


class LostRank(Exception):
    """Another rank has ended or does not answer, so that this one cannot go on."""


class RanksMustRestart(Exception):
    """This rank could not do its part of what all ranks do at the same time: all must start again from the
    last checkpoint."""


class OtherRankFailed(Exception):
    """Another rank could not do its part of the current window, which none of them can continue."""


class InterruptionRequested(Exception):
    """An interruption was requested between two micro-batches; the current window was abandoned."""
