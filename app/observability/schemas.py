"""Answers about health and the audit log."""

from typing import Literal

from app.contract.base import ResponseModel


class Health(ResponseModel):
    status: Literal["ok"]
    version: str


class AuditResponse(ResponseModel):
    """One request in the audit log."""

    id: str
    at: float
    key_id: str | None
    """null if no key exists yet, or if the request had no valid key."""
    method: str
    path: str
    status: int
    address: str
    request_id: str


class Readiness(ResponseModel):
    status: Literal["ready", "not_ready"]
    database: str
    workers: int
    note: str | None
