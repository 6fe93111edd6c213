"""Serves the dashboard: a page and its modules from `app/dashboard`. They contain no data."""

import gzip
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parent.parent / "dashboard"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts; inline styles are allowed for the chart library."""

_REVALIDATE = {"Cache-Control": "no-cache"}
"""Browsers may cache these files, but must revalidate them, since an update replaces them."""

router = APIRouter(include_in_schema=False)


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kw: Any) -> Response:
        response = super().file_response(*args, **kw)
        response.headers.update(_REVALIDATE)
        return response


@router.get("/")
async def page() -> FileResponse:
    return FileResponse(_FOLDER / "index.html", headers={"Content-Security-Policy": _POLICY, **_REVALIDATE})


@router.get("/dashboard/plotly.js")
def plotly(request: Request) -> Response:
    """The chart library from its own package: 5 MB, compressed once."""
    headers = {"Cache-Control": "max-age=86400", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            _plotly(), media_type="text/javascript", headers={**headers, "Content-Encoding": "gzip"}
        )
    return Response(gzip.decompress(_plotly()), media_type="text/javascript", headers=headers)


@lru_cache
def _plotly() -> bytes:
    content = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return gzip.compress(content, compresslevel=6, mtime=0)


def install(app: FastAPI) -> None:
    """Adds the page and its static files."""
    app.include_router(router)
    app.mount("/dashboard", _Static(directory=_FOLDER / "static"), name="dashboard")
