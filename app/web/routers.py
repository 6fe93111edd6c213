"""Routers with complete routes: their whole paths, the check of the caller, and the documented errors.

Applications add these routes to their own (`add_routes`). `FastAPI.include_router` would instead make every
route again for each application, at its first request, and search one more level at each request.
"""

from typing import Any

from fastapi import APIRouter, FastAPI

from app.web.dependencies import authorised
from app.web.late_route import LateRoute
from app.web.middleware import NATIVE
from app.web.thread_route import ThreadRoute

_PROBLEM: dict[str, Any] = {
    "description": "What is wrong, with the field and the remedy",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
"""A reference to the schema that `openapi.describe` adds. FastAPI would prepare a model for each route."""

_PROBLEMS: dict[int | str, dict[str, Any]] = {"4XX": _PROBLEM, "5XX": _PROBLEM}


def native_router(prefix: str = "", **options: Any) -> APIRouter:
    """A router of Accrue's own routes, below /gradient-accumulation. They need a caller.

    Args:
        options: further arguments of APIRouter.
    """
    return openai_router(f"{NATIVE}{prefix}", **options)


def openai_router(prefix: str, **options: Any) -> APIRouter:
    """A router of OpenAI-compatible routes. They need a caller."""
    options.setdefault("route_class", ThreadRoute)
    return public_router(prefix, dependencies=[authorised], **options)


def public_router(prefix: str = "", **options: Any) -> APIRouter:
    """A router of routes that anybody may call, unless a route checks its caller itself."""
    options.setdefault("route_class", LateRoute)
    return APIRouter(prefix=prefix, responses=_PROBLEMS, **options)


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Adds a router's routes to an application."""
    app.router.routes.extend(router.routes)
