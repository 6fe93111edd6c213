"""Unknown and repeated query parameters are rejected by name, like unknown fields of a body."""

from collections.abc import Callable
from typing import Any, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from app.errors import Unprocessable
from app.jobs.filters import is_metadata_filter, metadata_filters

_PARAMETERS: dict[Callable[..., Any], dict[str, bool]] = {}
"""A route's parameters and whether each may be repeated, by the route's function."""


_METADATA = "metadata[key]"


def check_names(request: Request) -> None:
    """Checks the names of the query's parameters.

    Raises:
        Unprocessable: the route has no parameter of that name, or the parameter must not be repeated.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    if route.endpoint not in _PARAMETERS:
        _PARAMETERS[route.endpoint] = _parameters_of(route.dependant)
    known = _PARAMETERS[route.endpoint]
    by_metadata = _METADATA in known
    seen = set()
    for name, _ in request.query_params.multi_items():
        shown = name[:100] or "query"
        if name not in known and not (by_metadata and is_metadata_filter(name)):
            accepted = ", ".join(sorted(known)) or "none"
            raise Unprocessable(
                f"Unknown query parameter {name[:100]!r}; this request accepts: {accepted}.", field=shown
            )
        if name in seen and not known.get(name, False):
            raise Unprocessable(f"Query parameter {name[:100]!r} is given twice: remove one.", field=shown)
        seen.add(name)


def _parameters_of(dependant: Dependant) -> dict[str, bool]:
    found = {field.alias: _is_list(field.field_info.annotation) for field in dependant.query_params}
    if dependant.call is metadata_filters:
        found[_METADATA] = False
    for each in dependant.dependencies:
        found |= _parameters_of(each)
    return found


def _is_list(annotation: Any) -> bool:
    """Whether a parameter is a list, optional or not."""
    return any(get_origin(each) is list for each in (annotation, *get_args(annotation)))
