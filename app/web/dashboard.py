"""Serves the dashboard: a page and its modules from `app/dashboard`. They contain no data."""

from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response

from app.web.routers import add_routes
from app.web.static_files import FilesInMemory, content_in_memory, file_in_memory

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
async def page(request: Request) -> Response:
    path = _FOLDER / "index.html"
    return file_in_memory(
        path, path.stat(), request.headers, {"Content-Security-Policy": _POLICY, **_REVALIDATE}
    )


@router.get("/dashboard/plotly.js")
def plotly(request: Request) -> Response:
    """The chart library from its own package: 5 MB, compressed once."""
    cached = {"Cache-Control": "max-age=86400"}
    return content_in_memory(_plotly(), request.headers, "text/javascript", cached)


@lru_cache
def _plotly() -> bytes:
    return files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()


def install(app: FastAPI) -> None:
    """Adds the page and its static files."""
    add_routes(app, router)
    app.mount("/dashboard", FilesInMemory(_FOLDER / "static", _REVALIDATE), name="dashboard")
