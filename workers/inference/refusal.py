"""Why a request cannot be answered."""

from app.contract.inference import InferenceError


class Refused(Exception):
    """A request that cannot be answered; the error says why, and contains nothing of what the user wrote."""

    def __init__(self, error: InferenceError) -> None:
        super().__init__(error.message)
        self.error = error


def refused(message: str, *, field: str | None = None, code: str = "invalid_request") -> Refused:
    """A refusal because of what was asked."""
    return Refused(InferenceError(status=400, code=code, message=message, field=field))


def unavailable(message: str) -> Refused:
    """A refusal because of the machine's state, which may change."""
    return Refused(InferenceError(status=503, code="unavailable", message=message))
