"""`Idempotency-Key`: a request that is sent twice is carried out once, and both receive the same answer."""

import hashlib
from dataclasses import dataclass

from fastapi import Response
from pydantic import BaseModel
from sqlalchemy import delete

from app.errors import Unprocessable
from app.storage.database import database_now, lock_until_commit
from app.storage.session import Session
from app.storage.tables import AnsweredRequest

_KEPT_SECONDS = 86400.0


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may be sent again.

    In the transaction that carries it out, `replay` comes first, and `remember` last.
    """

    key: str | None
    """The `Idempotency-Key` header; without one nothing is remembered."""
    owner: str
    """The id of the API key that sent it."""
    digest: bytes
    """A digest of the request, which distinguishes it from another request with the same key."""

    def with_content(self, digest: str) -> "IdempotentRequest":
        """This request, with the digest of a body that is read elsewhere."""
        return IdempotentRequest(self.key, self.owner, hashlib.sha256(self.digest + digest.encode()).digest())

    def replay(self, session: Session) -> Response | None:
        """The answer that this request received before; None if it is new.

        If the same request is being processed, this call waits until it is committed.

        Raises:
            Unprocessable: the key was used for a different request.
        """
        if self.key is not None:
            lock_until_commit(session, f"request {self.owner} {self.key}")
        return self.find_answer(session)

    def find_answer(self, session: Session) -> Response | None:
        """The answer that this request received before; None if it is new, or still being processed.

        Raises:
            Unprocessable: the key was used for a different request.
        """
        if self.key is None:
            return None
        row = session.get(AnsweredRequest, (self.owner, self.key))
        if row is None:
            return None
        if row.digest != self.digest.hex():
            raise Unprocessable(
                "This Idempotency-Key was used for a different request: use a new key for each request.",
                field="Idempotency-Key",
            )
        headers = {"Idempotency-Replayed": "true"}
        return Response(row.answer, row.status, headers, media_type="application/json")

    def remember(self, session: Session, answer: BaseModel, status: int = 200) -> None:
        """Keeps the answer for a day."""
        if self.key is None:
            return
        old = AnsweredRequest.created_at < database_now() - _KEPT_SECONDS
        session.execute(delete(AnsweredRequest).where(old))
        session.add(
            AnsweredRequest(
                owner=self.owner,
                key=self.key,
                digest=self.digest.hex(),
                created_at=database_now(),
                status=status,
                answer=answer.model_dump_json(),
            )
        )
