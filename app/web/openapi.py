"""The OpenAPI document, with additions that FastAPI does not generate."""

from typing import Any

from fastapi import FastAPI

from app.web.error_bodies import Problem

_KEY = {"HTTPBearer": {"type": "http", "scheme": "bearer", "description": "An ak_… key"}}
_PUBLIC_PATHS = ("/healthz", "/readyz")


def describe(app: FastAPI) -> None:
    """Adds the form of errors, and the routes that need a key, to the OpenAPI document."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            document["components"]["securitySchemes"] = _KEY
            for path, operation in _operations(document):
                if path not in _PUBLIC_PATHS:
                    operation["security"] = [{name: []} for name in _KEY]
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            document["components"]["schemas"] |= {**problem.pop("$defs"), "Problem": problem}
        return made()

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The operations, with their paths."""
    return [
        (path, operation) for path, methods in document["paths"].items() for operation in methods.values()
    ]
