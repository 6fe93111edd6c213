"""A route that reads JSON whatever the Content-Type is: plain `curl -d` declares a form."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.web.thread_route import ThreadRoute


class AnyContentTypeRoute(ThreadRoute):
    """For routes that change nothing, where a foreign page's form can do no harm."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_json(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handle(Request(request.scope, request.receive))

        return handle_as_json
