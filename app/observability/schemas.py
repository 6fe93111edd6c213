"""The service's own state."""

from typing import Literal

from app.contract.base import Answer


class Health(Answer):
    status: Literal["ok"]
    version: str


class AuditAnswer(Answer):
    """One request."""

    id: str
    at: float
    key_id: str | None
    """None: none was made yet, or none was shown that opens the service."""
    method: str
    path: str
    status: int
    address: str
    request_id: str


class Readiness(Answer):
    status: Literal["ready", "not_ready"]
    database: str
    workers: int
    note: str | None
