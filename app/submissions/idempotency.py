"""`Idempotency-Key`: the same request sent twice is done once, and answered twice."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Response
from pydantic import BaseModel
from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError

from app.errors import Unprocessable
from app.storage.database import Database, database_now
from app.storage.session import Session
from app.storage.tables import AnsweredRequest

_KEPT_SECONDS = 86400.0

Answer = TypeVar("Answer", bound=BaseModel)


class _Answered(Exception):
    def __init__(self, answer: str, status: int) -> None:
        self.answer, self.status = answer, status


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may come again: its key, if it has one, whose it is, and what it says."""

    key: str | None
    owner: str
    said: bytes
    """Everything by which it differs from another request, as a digest."""

    def with_content(self, digest: str) -> "IdempotentRequest":
        """The same of a request whose body was read elsewhere."""
        return IdempotentRequest(self.key, self.owner, hashlib.sha256(self.said + digest.encode()).digest())

    def make(
        self, database: Database, create: Callable[[Session], Answer], status: int = 200
    ) -> Answer | Response:
        """Creates in one transaction; or gives the answer that was given before.

        Raises:
            Unprocessable: the key came with another request.
        """
        try:
            return self._make(database, create, status)
        except IntegrityError:
            if self.key is None:
                raise
            return self._make(database, create, status)  # another with the same key was faster

    def _make(
        self, database: Database, create: Callable[[Session], Answer], status: int
    ) -> Answer | Response:
        try:
            with database.writing() as session:
                self._look(session)
                answer = create(session)
                self._remember(session, answer, status)
                return answer
        except _Answered as before:
            return Response(
                before.answer,
                before.status,
                media_type="application/json",
                headers={"Idempotency-Replayed": "true"},
            )

    def _look(self, session: Session) -> None:
        if self.key is None:
            return
        row = session.get(AnsweredRequest, (self.owner, self.key))
        if row is None:
            return
        if row.said != self.said.hex():
            raise Unprocessable(
                "This Idempotency-Key came with another request: use a new key for each.",
                field="Idempotency-Key",
            )
        raise _Answered(row.answer, row.status)

    def _remember(self, session: Session, answer: BaseModel, status: int) -> None:
        if self.key is None:
            return
        old = AnsweredRequest.created_at < database_now() - _KEPT_SECONDS
        session.execute(delete(AnsweredRequest).where(old))
        session.add(
            AnsweredRequest(
                owner=self.owner,
                key=self.key,
                said=self.said.hex(),
                created_at=database_now(),
                status=status,
                answer=answer.model_dump_json(),
            )
        )
