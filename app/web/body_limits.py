"""Limits on the bodies of requests: their size, the number of their values, the time in which they must
arrive, and how many of them are in memory at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from app.errors import TooLarge, TooManyRequests
from app.settings import Settings
from app.web.concurrency import ConcurrencyLimit, Turns

_FORM_OVERHEAD = 2**16
_BODY_WITHOUT_DATA = 2**18
"""The maximum body of routes that take no samples, in bytes: a configuration has a few thousand."""
_LARGE_BODY = 2**16
"""Bodies of more bytes count as uploads, like those of unknown size."""
MAX_UPLOADS_PER_KEY = 20
"""The maximum number of concurrent uploads of one key: a slow sender keeps a file or memory occupied."""
MAX_UPLOADS = 200
_MAX_VALUES = 150_000
"""The maximum number of values in a body with samples, counted by commas and brackets: validation takes
time."""
_VALUES_OF_A_REQUEST = 1500
"""Toward the rate limit, a large body counts as one further request for each 1,500 values."""
_MANY_VALUES, _MANY_BYTES = 5000, 2**20
"""Only a few bodies that are larger are validated at a time: one may take a hundred times its size in memory,
until it is answered."""
_LARGE_PER_KEY, _LARGE_AT_ONCE = 2, 4
_UPLOADS = ("/v1/files",)
"""The routes whose body is a file."""
_WITH_SAMPLES = "/gradient-accumulation/training/"
_WITH_PROMPTS = ("/v1/chat/", "/v1/completions")
_WITH_DATA = (_WITH_SAMPLES, *_WITH_PROMPTS)
"""The prefixes of the routes whose body may contain samples, or long prompts."""
_BODY_SECONDS = 60.0
"""Seconds in which a body must arrive; for an upload, in which its next part must arrive."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class BodyLimits:
    """The limits of one service, and the bodies that are in memory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._large = Turns(per_key=_LARGE_PER_KEY, total=_LARGE_AT_ONCE)
        self._transfers = ConcurrencyLimit("uploads", per_key=MAX_UPLOADS_PER_KEY, total=MAX_UPLOADS)

    def most_bytes(self, scope: Scope) -> int:
        """The maximum size of the body in bytes: large for file uploads, medium for routes that take
        samples, and small for all others."""
        if is_file_upload(scope):
            return self._settings.max_file_bytes + _FORM_OVERHEAD
        most = self._settings.max_body_bytes
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return most if path.startswith(_WITH_DATA) else min(most, _BODY_WITHOUT_DATA)

    def begin(self, scope: Scope, headers: Headers, key_id: str | None) -> Callable[[], None]:
        """Counts the request if its body is a transfer. Returns a function to be called at its end.

        Raises:
            TooManyRequests: too many bodies of the key, or of all keys, are arriving.
        """
        return self._transfers.acquire(key_id) if _is_transfer(scope, headers) else _nothing

    @asynccontextmanager
    async def limited(
        self, scope: Scope, receive: Receive, send: Send, key_id: str | None
    ) -> AsyncIterator[tuple[Receive, Send]]:
        """What receives the body within its limits, and what sends the response. A large body waits for its
        turn once it has arrived. The turn ends when the response begins, so that a slow reader does not hold
        it."""
        async with AsyncExitStack() as until_answered:

            async def admit(values: int, size: int) -> None:
                await _charge(scope, key_id, values)
                if values > _MANY_VALUES or size > _MANY_BYTES:
                    await until_answered.enter_async_context(self._large.turn(key_id))

            async def send_after_turn(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await until_answered.aclose()
                await send(message)

            whole = not is_file_upload(scope)
            limit = self.most_bytes(scope)
            yield (
                _limited(
                    receive, limit, too_large(scope, limit), _too_many_values(scope), admit, whole=whole
                ),
                send_after_turn,
            )


def is_file_upload(scope: Scope) -> bool:
    """Whether the body is a file."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] == "POST" and path.rstrip("/") in _UPLOADS


def _is_transfer(scope: Scope, headers: Headers) -> bool:
    """Whether the request's body occupies a file or much memory until the client has sent all of it."""
    if scope["method"] in _WITHOUT_BODY:
        return False
    length = headers.get("content-length", "0")
    large = length.isdigit() and int(length) > _LARGE_BODY
    return large or "transfer-encoding" in headers or is_file_upload(scope)


def _nothing() -> None:
    """The end of a request that was not counted."""


def too_large(scope: Scope, limit: int) -> str:
    """What to do if a body has more than `limit` bytes."""
    if is_file_upload(scope):
        return f"The upload is larger than {limit} bytes: split the file, or raise ACCRUE_MAX_FILE_BYTES."
    remedy = _remedy(scope)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path.startswith(_WITH_DATA):
        return f"The body is larger than {limit} bytes: {remedy}, or raise ACCRUE_MAX_BODY_BYTES."
    return f"The body is larger than {limit} bytes, the most that this route accepts: {remedy}."


def _too_many_values(scope: Scope) -> str:
    return f"The body contains more values than this route accepts: {_remedy(scope)}."


def _remedy(scope: Scope) -> str:
    """How a body can be made smaller."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path.startswith(_WITH_SAMPLES):
        return "upload the data with POST /v1/files and name it by its file_id"
    if path.startswith(_WITH_PROMPTS):
        return "send fewer or shorter prompts, as text instead of tokens"
    return "make it smaller"


async def _charge(scope: Scope, key_id: str | None, values: int) -> None:
    """Counts a request with a large body as several ones of its key, since its validation takes as long.

    Raises:
        HTTPException: the key has reached its rate limit.
    """
    if key_id is None or values < _VALUES_OF_A_REQUEST:
        return
    try:
        await scope["app"].state.rates.count(key_id, values // _VALUES_OF_A_REQUEST)
    except TooManyRequests as error:
        headers = {"Retry-After": str(error.retry_after_seconds)}
        raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, error.message, headers) from None


def _limited(
    receive: Receive,
    limit: int,
    why: str,
    too_many: str,
    admit_body: Callable[[int, int], Awaitable[None]],
    *,
    whole: bool,
) -> Receive:
    """Limits the size of a body, even without a content-length, and the time in which it must arrive.

    Args:
        why: the message if it is larger.
        too_many: the message if it has too many values.
        admit_body: called with the number of values in a whole body and its size in bytes.
        whole: whether the time limit is for the whole body; otherwise it is for each part.
    """
    taken, values, arrived = 0, 0, False
    until = time.monotonic() + _BODY_SECONDS

    async def receive_limited() -> Message:
        nonlocal taken, values, arrived, until
        if arrived:
            message = await receive()
        else:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "The body arrives too slowly.") from None
        arrived = not message.get("more_body", False)
        until = until if whole else time.monotonic() + _BODY_SECONDS
        body = message.get("body", b"")
        taken += len(body)
        if taken > limit:
            raise HTTPException(TooLarge.status, why)
        values += sum(map(body.count, (b",", b"[", b"{"))) if whole else 0
        if values > _MAX_VALUES:
            raise HTTPException(TooLarge.status, too_many)
        if arrived and values:
            await admit_body(values, taken)
            values = 0
        return message

    return receive_limited
