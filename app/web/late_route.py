"""Routes that FastAPI prepares at their first use.

Preparing a route builds the models of its parameters, its body and its answer. For all routes together, this
took a seventh of the time in which the service starts.
"""

import warnings
from collections.abc import Callable
from threading import RLock
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path, get_name

# pydantic warns about the aliases of FastAPI's body fields. FastAPI suppresses the warning where it declares
# a field, but the schema of a body is built later (app/contract/base.py).
warnings.filterwarnings("ignore", "The 'alias' attribute with value .* was provided", UserWarning)

_preparing = RLock()


class LateRoute(APIRoute):
    """A route with what is needed to find it. The first use of any other attribute prepares the route: by its
    first request, or by the OpenAPI document."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path = path
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.endpoint = endpoint
        self.name = options.get("name") or get_name(endpoint)
        self.methods = {method.upper() for method in options.get("methods") or ["GET"]}
        self.tags = options.get("tags") or []
        self.include_in_schema = options.get("include_in_schema", True)
        self._options: dict[str, Any] | None = options

    def __getattr__(self, name: str) -> Any:
        """Prepares the route, if no thread has: Python calls this for an attribute that is not set yet."""
        with _preparing:
            options = vars(self).get("_options")
            if options is not None:
                vars(self).update(vars(self._complete(options)), _options=None)
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def _complete(self, options: dict[str, Any]) -> APIRoute:
        """
        Raises:
            RuntimeError: an attribute is missing. An AttributeError would say that this route lacks one.
        """
        try:
            return self._prepared(options)
        except AttributeError as error:
            raise RuntimeError(f"{self.path} cannot be prepared") from error

    def _prepared(self, options: dict[str, Any]) -> APIRoute:
        """The complete route."""
        route = object.__new__(type(self))
        APIRoute.__init__(route, self.path, self.endpoint, **options)
        return route
