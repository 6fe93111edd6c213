"""The service's own state."""

from typing import Literal

from app.schemas.wire import Answer


class Health(Answer):
    status: Literal["ok"]
    version: str


class Readiness(Answer):
    status: Literal["ready", "not_ready"]
    database: str
    workers: int
    note: str | None
