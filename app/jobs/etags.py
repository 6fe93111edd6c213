"""Serialised answers about jobs: cached for ended jobs, and identified by an ETag."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

from app.contract.states import ENDED
from app.jobs.reads import Row
from app.storage.tables import Job

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Not modified: the ETag in If-None-Match is still current"}
}
_MOST_KEPT = 1000


@dataclass(frozen=True)
class Document:
    """The body of an answer, and its ETag."""

    body: bytes
    tag: str


class AnswerCache:
    """Caches the serialised answers of ended jobs until their rows change.

    Other jobs are not cached: answers about them also depend on the time and on the jobs ahead of them.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[Row, Document]] = OrderedDict()

    def document(self, surface: str, row: Row, answer: Callable[[Job], BaseModel]) -> Document:
        """The document of a job for the native or the OpenAI surface.

        Args:
            answer: builds the answer if it is not cached.
        """
        key = (surface, row["id"])
        kept = self._kept.get(key)
        if kept is not None and kept[0] == row:
            return kept[1]
        body = answer(row.job()).model_dump_json().encode()
        document = Document(body, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
        if row["status"] in ENDED:
            self._kept[key] = row, document
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return document

    def page_response(
        self, surface: str, rows: Sequence[Row], limit: int, answer: Callable[[Job], BaseModel]
    ) -> Response:
        """A page of the first `limit` rows."""
        shown = rows[:limit]
        rest = {
            "has_more": len(rows) > limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }
        data = b",".join(self.document(surface, row, answer).body for row in shown)
        end = json.dumps(rest, separators=(",", ":"))[1:].encode()
        return Response(b'{"object":"list","data":[' + data + b"]," + end, media_type="application/json")


def tagged(request: Request, document: Document) -> Response:
    """The document, or 304 if the client has it already."""
    shown = request.headers.get("if-none-match", "")
    tags = {each.strip().removeprefix("W/") for each in shown.split(",")}
    if tags & {document.tag, "*"}:
        return Response(status_code=304, headers={"ETag": document.tag})
    return Response(document.body, media_type="application/json", headers={"ETag": document.tag})
