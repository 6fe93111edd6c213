"""Routes whose plain functions run in threads, of which no key occupies all.

FastAPI runs an endpoint that is not a coroutine in a pool of threads that all requests share. Without turns,
a burst of one key's requests would fill the pool, and those of other keys would wait behind all of them.
"""

import inspect
from collections.abc import Callable
from typing import Any

from fastapi import Depends
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.routing import APIRoute

from app.web.dependencies import own_turn


class ThreadRoute(APIRoute):
    """A route whose endpoint, if it is a plain function, waits for its key's turn. It needs a caller."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if not inspect.iscoroutinefunction(endpoint):
            # The last dependency, since others may read the body, which a client may send slowly. It ends
            # before the answer is sent.
            turn = Depends(own_turn, scope="function")
            last = get_parameterless_sub_dependant(depends=turn, path=self.path_format)
            self.dependant.dependencies.append(last)
