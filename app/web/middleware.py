"""Middleware for every request: an id, a size limit, the check of its origin, one log line."""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from http import HTTPStatus

import structlog
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.contract.text import is_storable, storable
from app.errors import AccrueError, Forbidden, InvalidRequest, TooLarge, TooManyRequests
from app.observability.prometheus import Exposition
from app.security.audit import AuditLog, AuditRecord
from app.security.authentication import admit, bearer
from app.security.keys import Caller, is_well_formed
from app.security.local import refusal
from app.settings import LOOPBACK, Settings
from app.storage.ids import request_id
from app.web.concurrency import ConcurrencyLimit, Turns
from app.web.content_type import has_other_charset, is_multipart
from app.web.error_bodies import accrue_error, database_unavailable, problem_response, unexpected
from app.web.latency import LatencyGauge

log = structlog.get_logger("accrue.service")

NATIVE = "/gradient-accumulation"
_ALTERNATIVE_PREFIX = "/api/v1"

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_FORM_OVERHEAD = 2**16
_BODY_WITHOUT_DATA = 2**18
"""The maximum body of routes that take no samples, in bytes: a configuration has a few thousand."""
_LARGE_BODY = 2**16
"""Bodies of more bytes count as uploads, like those of unknown size."""
MAX_UPLOADS_PER_KEY = 20
"""The maximum number of concurrent uploads of one key: a slow sender keeps a file or memory occupied."""
MAX_UPLOADS = 200
_SENT_AT_ONCE = 2**15
"""Responses are sent in parts of this many bytes, so that a slow reader keeps only one part in memory."""
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
_WITH_DATA = f"{NATIVE}/training/"
"""The prefix of the routes whose body may contain samples."""
CALCULATORS = "calculators"
"""The tag of routes that change nothing, although their method is POST."""
_PAGES = ("/", "/docs")
_PUBLIC_PATHS = ("/healthz", "/readyz")
_BODY_SECONDS = 60.0
"""Seconds in which a body must arrive; for an upload, in which its next part must arrive."""
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_MAX_PATH_CHARS = 500
_MAX_LENGTH_DIGITS = 15
"""A content-length with more digits than this is too large, and is not even parsed."""


_AN_ADDRESS = re.compile(r"[\w.:%-]{1,64}", re.ASCII)


class RequestMiddleware:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        latency: LatencyGauge,
        audit: AuditLog,
        exposition: Exposition,
        is_mounted: bool,
    ) -> None:
        """
        Args:
            is_mounted: whether the service is mounted in another application, which authenticates the users.
        """
        self.app = app
        self.audit = audit
        self.exposition = exposition
        self.is_mounted = is_mounted
        self.settings = settings
        self.latency = latency
        self.large_bodies = Turns(per_key=_LARGE_PER_KEY, total=_LARGE_AT_ONCE)
        self.transfers = ConcurrencyLimit("uploads", per_key=MAX_UPLOADS_PER_KEY, total=MAX_UPLOADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        _strip_api_prefix(scope)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identifier = given if _REQUEST_ID.match(given) else request_id()
        structlog.contextvars.bind_contextvars(request_id=identifier)
        status = 500
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = int(message["status"]), True
                _add_headers(MutableHeaders(scope=message), identifier)
            for part in _parts(message):
                await send(part)

        try:
            await self._answer(scope, receive, send_with_id, headers)
        except Exception as error:
            log.exception("unexpected error", path=scope["path"], exc_info=error)
            if not started:
                await unexpected(Request(scope))(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            self.latency.add(seconds)
            self.exposition.answered(scope["method"], _template(scope), status, seconds)
            log_request = (
                log.debug
                if scope["method"] in _READ_METHODS and status < HTTPStatus.BAD_REQUEST
                else log.info
            )
            log_request("request", method=scope["method"], path=scope["path"], status=status,
                 milliseconds=round(1000 * seconds, 1))  # fmt: skip
            self._note(scope, status, identifier)
            structlog.contextvars.clear_contextvars()

    def _note(self, scope: Scope, status: int, identifier: str) -> None:
        """Writes requests that change something, and refused ones, to the audit log."""
        refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        reads = scope["method"] in _READ_METHODS or CALCULATORS in getattr(scope.get("route"), "tags", [])
        if reads and not (self.settings.audit_reads or refused):
            return
        caller: Caller | None = scope.get("state", {}).get("caller")
        key_id = caller.key_id if caller is not None else None
        address = _address(scope["client"][0]) if scope.get("client") else "?"
        path = storable(scope["path"])[:_MAX_PATH_CHARS]
        record = AuditRecord(time.time(), key_id, scope["method"], path, status, address, identifier)
        self.audit.note(record, is_known=caller is not None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """Passes the request on if it is accepted. Nothing of its body is read before that."""
        response = await self._refused(scope, headers)
        if response is not None:
            await response(scope, receive, send)
            return
        caller: Caller | None = scope.get("state", {}).get("caller")
        key_id = caller.key_id if caller is not None else None
        async with contextlib.AsyncExitStack() as until_answered:

            async def admit_body(values: int, size: int) -> None:
                await _charge(scope, values)
                if values > _MANY_VALUES or size > _MANY_BYTES:
                    await until_answered.enter_async_context(self.large_bodies.turn(key_id))

            limited = _limited(receive, self._limit(scope), admit_body, whole=not self._is_upload(scope))
            await self._answer_counted(scope, limited, send, headers, key_id)

    async def _answer_counted(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, key_id: str | None
    ) -> None:
        """Passes the request on, unless too many large bodies of its key are arriving."""
        if not self._is_transfer(scope, headers):
            await self.app(scope, receive, send)
            return
        try:
            end = self.transfers.acquire(key_id)
        except TooManyRequests as error:
            response = accrue_error(Request(scope), error)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            end()

    async def _refused(self, scope: Scope, headers: Headers) -> Response | None:
        """The response to a rejected request, or None if the request is accepted."""
        request = Request(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not is_storable(scope["path"]) or b"%00" in scope["query_string"]:
            return problem_response(
                request, 400, InvalidRequest.code, InvalidRequest.title,
                "The URL contains a NUL character: remove it.",
            )  # fmt: skip
        if not self._skips_origin_check(headers):
            why = refusal(headers, self.settings.allowed_origins, is_page=path in _PAGES)
            if why is not None:
                return problem_response(request, 403, Forbidden.code, Forbidden.title, why)
        limit, length = self._limit(scope), headers.get("content-length", "0")
        if length.isdigit() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit):
            return problem_response(
                request, TooLarge.status, TooLarge.code, TooLarge.title, _too_large(limit), param="body",
                headers={"Connection": "close"},
            )  # fmt: skip
        if scope["method"] in _READ_METHODS or path in _PUBLIC_PATHS:
            return None  # without a body, the route's own check of the key is early enough
        is_upload = self._is_upload(scope)
        try:
            caller = await admit(request)
            if is_upload and not caller.may("write"):  # before the upload is received
                raise Forbidden(
                    "This key lacks the scope write: create one with accrue keys create NAME --scope write."
                )
        except (AccrueError, OperationalError, PoolTimeout) as error:
            answer = accrue_error if isinstance(error, AccrueError) else database_unavailable
            response = answer(request, error)
            response.headers["Connection"] = "close"
            return response
        if is_upload and has_other_charset(headers):
            return problem_response(
                request, 415, "unsupported_media_type", "Unsupported media type",
                "Send the form in UTF-8: leave charset out.", headers={"Connection": "close"},
            )  # fmt: skip
        if is_upload and not is_multipart(headers):
            return problem_response(
                request, 415, "unsupported_media_type", "Unsupported media type",
                "Send the file as multipart/form-data, in the field file.", headers={"Connection": "close"},
            )  # fmt: skip
        return None

    def _skips_origin_check(self, headers: Headers) -> bool:
        """Whether the Host and Origin checks are skipped: the request carries a well-formed key, or the
        service is not limited to loopback."""
        on_loopback = self.settings.host in LOOPBACK and not self.is_mounted
        return not on_loopback or is_well_formed(bearer(headers) or "")

    def _is_upload(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] == "POST" and path.rstrip("/") in _UPLOADS

    def _is_transfer(self, scope: Scope, headers: Headers) -> bool:
        """Whether the request's body occupies a file or much memory until the client has sent all of it."""
        if scope["method"] in _READ_METHODS:
            return False
        length = headers.get("content-length", "0")
        large = length.isdigit() and int(length) > _LARGE_BODY
        return large or "transfer-encoding" in headers or self._is_upload(scope)

    def _limit(self, scope: Scope) -> int:
        """The maximum size of the body in bytes: large for file uploads, medium for routes that take
        samples, and small for all others."""
        if self._is_upload(scope):
            return self.settings.max_file_bytes + _FORM_OVERHEAD
        most = self.settings.max_body_bytes
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return most if path.startswith(_WITH_DATA) else min(most, _BODY_WITHOUT_DATA)


def _strip_api_prefix(scope: Scope) -> None:
    """Removes the prefix `/api/v1`, under which the native routes can also be called."""
    root = scope.get("root_path", "")
    if scope["path"].startswith(f"{root}{_ALTERNATIVE_PREFIX}{NATIVE}"):
        scope["path"] = root + scope["path"][len(root) + len(_ALTERNATIVE_PREFIX) :]


def _parts(message: Message) -> Iterator[Message]:
    """A message of a response, with a large body split into several."""
    body = message.get("body", b"")
    if len(body) <= _SENT_AT_ONCE:
        yield message
        return
    last = len(body) - _SENT_AT_ONCE
    for start in range(0, len(body), _SENT_AT_ONCE):
        more = start < last or message.get("more_body", False)
        yield {**message, "body": body[start : start + _SENT_AT_ONCE], "more_body": more}


def _template(scope: Scope) -> str:
    """The route's path template, such as `/training/{training_id}`; there are only a few of them. A path that
    does not take the request's method counts as no route."""
    route = scope.get("route")
    takes: Collection[str] | None = getattr(route, "methods", None)
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    if takes is not None and method not in takes:
        return "none"
    return getattr(route, "path", "none")


def _add_headers(headers: MutableHeaders, identifier: str) -> None:
    """Adds the request's id, and headers that stop a browser from sniffing, framing or executing the
    response."""
    headers["x-request-id"] = identifier
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["X-Frame-Options"] = "DENY"
    if not headers.get("content-type", "").startswith("text/html"):
        headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"


def _too_large(limit: int) -> str:
    return (
        f"The body is larger than {limit} bytes: upload the data with POST /v1/files and name it by its "
        "file_id, or raise ACCRUE_MAX_BODY_BYTES or ACCRUE_MAX_FILE_BYTES."
    )


_TOO_MANY_VALUES = (
    "The body contains more values than this route accepts: upload the data with POST /v1/files and "
    "name it by "
    "its file_id."
)


async def _charge(scope: Scope, values: int) -> None:
    """Counts a request with a large body as several ones of its key, since its validation takes as long.

    Raises:
        HTTPException: the key has reached its rate limit.
    """
    caller: Caller | None = scope.get("state", {}).get("caller")
    if caller is None or caller.key_id is None or values < _VALUES_OF_A_REQUEST:
        return
    try:
        await scope["app"].state.rates.count(caller.key_id, values // _VALUES_OF_A_REQUEST)
    except TooManyRequests as error:
        headers = {"Retry-After": str(error.retry_after_seconds)}
        raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, error.message, headers) from None


def _limited(
    receive: Receive, limit: int, admit_body: Callable[[int, int], Awaitable[None]], *, whole: bool
) -> Receive:
    """Limits the size of a body, even without a content-length, and the time in which it must arrive.

    Args:
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
            raise HTTPException(TooLarge.status, _too_large(limit))
        values += sum(map(body.count, (b",", b"[", b"{"))) if whole else 0
        if values > _MAX_VALUES:
            raise HTTPException(TooLarge.status, _TOO_MANY_VALUES)
        if arrived and values:
            await admit_body(values, taken)
            values = 0
        return message

    return receive_limited


def _address(host: str) -> str:
    """A client's address, or `?` if a proxy passed on something that is not an address."""
    return host if _AN_ADDRESS.fullmatch(host) else "?"
