"""Answers that say by an ETag whether they are still the same."""

import hashlib
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel

NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing changed since the answer whose ETag If-None-Match shows"}
}


def tagged(request: Request, answer: BaseModel) -> Response:
    """The answer as JSON, or nothing but a 304 to whoever has it already."""
    body = answer.model_dump_json().encode()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    shown = request.headers.get("if-none-match")
    if shown is not None and tag in (each.strip().removeprefix("W/") for each in shown.split(",")):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})
