"""Serves `/docs`, the interactive OpenAPI page, from local files."""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from app.web.routers import add_routes
from app.web.static_files import FilesInMemory

_FOLDER = Path(str(files("fastapi_offline").joinpath("static")))
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts; its own script is inline."""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def page(request: Request) -> Response:
    root = request.scope.get("root_path", "")
    shown = get_swagger_ui_html(
        title=f"{request.app.title} · API",
        openapi_url=f"{root}{request.app.openapi_url}",
        swagger_js_url=f"{root}/docs/static/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/static/swagger-ui.css",
        swagger_favicon_url=f"{root}/dashboard/icon.svg",
        swagger_ui_parameters={"tryItOutEnabled": True, "filter": True},
    )
    shown.headers["Content-Security-Policy"] = _POLICY
    return shown


def install(app: FastAPI) -> None:
    """Adds the page and its static files."""
    add_routes(app, router)
    app.mount("/docs/static", FilesInMemory(_FOLDER), name="docs")
