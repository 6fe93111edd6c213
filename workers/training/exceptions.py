"""Exceptions that end a run, with a message for the user."""


class CannotTrain(Exception):
    """The job as it stands cannot be trained, and would fail the same way again.

    The message says what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Interrupted(Exception):
    """The trainer was stopped, and has written a checkpoint."""


class StopRequested(Exception):
    """A stop was requested between two micro-batches; the current window was abandoned."""
