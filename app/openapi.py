"""The OpenAPI document, with what FastAPI does not say by itself."""

from typing import Any

from fastapi import FastAPI

_PROBLEM = "application/problem+json"


def describe(app: FastAPI) -> None:
    """Has the document say that errors are problem documents."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            for operation in _operations(document):
                for status, answer in operation["responses"].items():
                    if status in ("4XX", "5XX"):
                        answer["content"] = {_PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
        return made()

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]
