"""Routes whose endpoint opens its database session itself, in its own thread.

FastAPI runs a plain dependency, the endpoint and the serialisation of its answer as separate jobs of one
pool of threads. A session that a dependency had opened would be held between them, with its connection and,
on SQLite, the right to write; requests that wait for these would occupy all threads, so that nobody could end
the session.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from app.web.dependencies import Reading, Writing
from app.web.thread_route import ThreadRoute


class SessionRoute(ThreadRoute):
    """A route whose endpoint may have parameters of the types `Reading` and `Writing`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _opening_sessions(endpoint), **options)


def _opening_sessions(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """An endpoint that opens its sessions when it is called, and closes them before it returns."""
    parameters = inspect.signature(endpoint, follow_wrapped=False).parameters
    names = [name for name, each in parameters.items() if each.annotation in (Reading, Writing)]
    if not names:
        return endpoint  # or it opens them already: FastAPI makes a route again to include it
    assert not inspect.iscoroutinefunction(endpoint), "queries would block the event loop"

    @functools.wraps(endpoint)
    def opening(**arguments: Any) -> Any:
        with ExitStack() as sessions:
            for name in names:
                arguments[name] = sessions.enter_context(arguments[name]())
            return endpoint(**arguments)

    return opening
