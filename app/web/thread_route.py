"""Routes whose plain functions run in threads, of which no key occupies all.

FastAPI runs an endpoint that is not a coroutine in a pool of threads that all requests share. Without turns,
a burst of one key's requests would fill the pool, and those of other keys would wait behind all of them.
"""

import inspect
from typing import Any

from fastapi import Depends
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.routing import APIRoute

from app.web.dependencies import own_turn
from app.web.late_route import LateRoute


class ThreadRoute(LateRoute):
    """A route whose endpoint, if it is a plain function, waits for its key's turn. It needs a caller."""

    def _prepared(self, options: dict[str, Any]) -> APIRoute:
        route = super()._prepared(options)
        if not inspect.iscoroutinefunction(route.endpoint):
            # The last dependency, since others may read the body, which a client may send slowly. It ends
            # before the answer is sent.
            turn = Depends(own_turn, scope="function")
            last = get_parameterless_sub_dependant(depends=turn, path=route.path_format)
            route.dependant.dependencies.append(last)
        return route
