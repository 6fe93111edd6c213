"""Routes whose plain functions run in threads, of which no key occupies all.

FastAPI runs an endpoint that is not a coroutine in a pool of threads that all requests share. Without turns,
a burst of one key's requests would fill the pool, and those of other keys would wait behind all of them.
"""

import inspect
from collections.abc import Callable
from typing import Any

from fastapi import Depends
from fastapi.routing import APIRoute

from app.web.dependencies import own_turn


class ThreadRoute(APIRoute):
    """A route whose endpoint, if it is a plain function, waits for its key's turn. It needs a caller."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not inspect.iscoroutinefunction(endpoint):
            turn = Depends(own_turn, scope="function")  # which ends before the answer is sent
            options["dependencies"] = [*(options.get("dependencies") or ()), turn]
        super().__init__(path, endpoint, **options)
