"""Serves the dashboard: a page and its modules from `app/dashboard`. They contain no data."""

import gzip
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response

from app.web.routers import add_routes
from app.web.static_files import FilesInMemory, file_in_memory

_FOLDER = Path(__file__).parent.parent / "dashboard"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts; inline styles are allowed for the chart library."""

_REVALIDATE = {"Cache-Control": "no-cache"}
"""Browsers may cache these files, but must revalidate them, since an update replaces them."""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    path = _FOLDER / "index.html"
    return file_in_memory(path, path.stat(), {"Content-Security-Policy": _POLICY, **_REVALIDATE})


@router.get("/dashboard/plotly.js")
def plotly(request: Request) -> Response:
    """The chart library from its own package: 5 MB, compressed once."""
    headers = {"Cache-Control": "max-age=86400", "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(_plotly(), media_type="text/javascript", headers=headers)
    headers["Content-Encoding"] = "gzip"
    return Response(_compressed_plotly(), media_type="text/javascript", headers=headers)


@lru_cache
def _plotly() -> bytes:
    return files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()


@lru_cache
def _compressed_plotly() -> bytes:
    return gzip.compress(_plotly(), compresslevel=6, mtime=0)


def install(app: FastAPI) -> None:
    """Adds the page and its static files."""
    add_routes(app, router)
    app.mount("/dashboard", FilesInMemory(_FOLDER / "static", _REVALIDATE), name="dashboard")
