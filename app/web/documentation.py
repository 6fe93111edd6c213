"""Serves `/openapi.json`, and `/docs`, its interactive page, from local files."""

import json
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from app.web.routers import add_routes
from app.web.static_files import FilesInMemory, content_in_memory

_FOLDER = Path(str(files("fastapi_offline").joinpath("static")))
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts; its own script is inline."""

router = APIRouter(include_in_schema=False)


_DOCUMENT = "/openapi.json"


@router.get(_DOCUMENT)
async def document(request: Request) -> Response:
    """The OpenAPI document. It needs no key, so it is written and compressed only once."""
    root = request.scope.get("root_path", "").rstrip("/")
    documents: dict[str, bytes] = request.app.state.openapi_documents
    if root not in documents:
        described = request.app.openapi()
        if root:
            described = {**described, "servers": [{"url": root}]}
        documents[root] = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    return content_in_memory(documents[root], request.headers, "application/json", {})


@router.get("/docs")
async def page(request: Request) -> Response:
    root = request.scope.get("root_path", "")
    shown = get_swagger_ui_html(
        title=f"{request.app.title} · API",
        openapi_url=f"{root}{_DOCUMENT}",
        swagger_js_url=f"{root}/docs/static/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/static/swagger-ui.css",
        swagger_favicon_url=f"{root}/dashboard/icon.svg",
        swagger_ui_parameters={"tryItOutEnabled": True, "filter": True},
    )
    shown.headers["Content-Security-Policy"] = _POLICY
    return shown


def install(app: FastAPI) -> None:
    """Adds the page and its static files."""
    app.state.openapi_documents = {}
    add_routes(app, router)
    app.mount("/docs/static", FilesInMemory(_FOLDER), name="docs")
