"""Static files that are sent from memory: a slow reader holds no file open."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

PathLike = str | os.PathLike[str]


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
        response = file_in_memory(full_path, stat_result, self._headers, status_code)
        if self.is_not_modified(response.headers, Headers(scope=scope)):
            return NotModifiedResponse(response.headers)
        return response


def file_in_memory(
    path: PathLike, stat: os.stat_result, headers: dict[str, str], status_code: int = 200
) -> Response:
    """Responds with a file's content, its type, and the ETag that `FileResponse` would give it."""
    described: Any = FileResponse(path, stat_result=stat)
    content = _content(os.fspath(path), stat.st_mtime_ns, stat.st_size)
    tags = {name: described.headers[name] for name in ("etag", "last-modified")}
    return Response(content, status_code, {**tags, **headers}, media_type=described.media_type)


@lru_cache(maxsize=256)
def _content(path: str, modified_ns: int, size: int) -> bytes:
    return Path(path).read_bytes()
