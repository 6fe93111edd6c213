"""Static files that are sent from memory: a slow reader holds no file open, and each is compressed once."""

import gzip
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

PathLike = str | os.PathLike[str]

_LEAST_COMPRESSED = 2**14
"""Smaller contents are not compressed, in bytes."""


class FilesInMemory(StaticFiles):
    """The small files of one folder.

    Args:
        headers: added to each response.
    """

    def __init__(self, directory: Path, headers: dict[str, str] | None = None) -> None:
        super().__init__(directory=directory)
        self._headers = headers or {}

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Responds with the file, or with 304 if the client has it already."""
        requested = Headers(scope=scope)
        response = file_in_memory(full_path, stat_result, requested, self._headers, status_code)
        if self.is_not_modified(response.headers, requested):
            return NotModifiedResponse(response.headers)
        return response


def file_in_memory(
    path: PathLike,
    stat: os.stat_result,
    requested: Mapping[str, str],
    headers: dict[str, str],
    status_code: int = 200,
) -> Response:
    """Responds with a file's content, its type, and the ETag that `FileResponse` would give it.

    Args:
        requested: the request's headers.
        headers: added to the response.
    """
    described: Any = FileResponse(path, stat_result=stat)
    content = _content(os.fspath(path), stat.st_mtime_ns, stat.st_size)
    tags = {name: described.headers[name] for name in ("etag", "last-modified")}
    return content_in_memory(content, requested, described.media_type, {**tags, **headers}, status_code)


def content_in_memory(
    content: bytes,
    requested: Mapping[str, str],
    media_type: str,
    headers: Mapping[str, str],
    status_code: int = 200,
) -> Response:
    """Responds with a content that stays the same, compressed if it is large and the client accepts gzip.

    Args:
        content: the same object each time, so that its compressed form is found again quickly.
    """
    own = dict(headers)
    if len(content) >= _LEAST_COMPRESSED and "gzip" in requested.get("accept-encoding", ""):
        content = _compressed(content)
        own |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}  # else the middleware adds Vary
    return Response(content, status_code, own, media_type=media_type)


@lru_cache(maxsize=256)
def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=6, mtime=0)


@lru_cache(maxsize=256)
def _content(path: str, modified_ns: int, size: int) -> bytes:
    return Path(path).read_bytes()
