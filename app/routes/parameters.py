"""A parameter in the query that a route does not have is refused by name, as a field in a body is."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.errors import Unprocessable
from app.routes.filters import is_filter

_NAMES: dict[Callable[..., Any], frozenset[str]] = {}
"""By the route's function."""


def check_names(request: Request) -> None:
    """Raises:
    Unprocessable: a parameter has a name that the route does not know.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    if route.endpoint not in _NAMES:
        _NAMES[route.endpoint] = frozenset(_names_of(route.dependant))
    known = _NAMES[route.endpoint]
    for name in request.query_params:
        if name not in known and not is_filter(name):
            told = ", ".join(sorted(known)) or "none"
            raise Unprocessable(
                f"{name[:100]!r} is no parameter of this request; there are: {told}.",
                field=name[:100] or "query",
            )


def _names_of(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_names_of(each) for each in dependant.dependencies))
