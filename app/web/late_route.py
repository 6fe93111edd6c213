"""Routes that FastAPI prepares at their first use.

Preparing a route builds the models of its parameters, its body and its answer. For all routes together, this
takes longer than anything else when the service starts.
"""

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path


class LateRoute(APIRoute):
    """A route with what is needed to find it; its other attributes are made when one of them is first read,
    by its first request or by the OpenAPI document."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path = path
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.endpoint = endpoint
        self.methods = {method.upper() for method in options.get("methods") or ["GET"]}
        self.tags = options.get("tags") or []
        self._options: dict[str, Any] | None = options

    def __getattr__(self, name: str) -> Any:
        """Python calls this for an attribute that the route did not have when it looked.

        Threads may prepare a route at the same time, with equal results; each appears as a whole.
        """
        options = vars(self).get("_options")
        if options is not None:
            vars(self).update(vars(self._prepared(options)), _options=None)
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def _prepared(self, options: dict[str, Any]) -> APIRoute:
        """The complete route."""
        route = object.__new__(type(self))
        APIRoute.__init__(route, self.path, self.endpoint, **options)
        return route
