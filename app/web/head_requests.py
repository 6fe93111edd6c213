"""HEAD requests: FastAPI's routes accept only the methods that they name."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Answered(Exception):
    """The head of the response has been sent: the route need not produce the body."""


class HeadRequests:
    """ASGI middleware that answers HEAD with the status and headers of the response to GET."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise _Answered

        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]  # only for GET
        as_get = {**scope, "method": "GET", "headers": headers}
        try:
            await self.app(as_get, receive, send_head)
        except _Answered:
            pass
        finally:
            # The outer middleware reads the route and the caller.
            scope.update({**as_get, "method": "HEAD", "headers": scope["headers"]})
