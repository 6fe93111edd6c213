"""Middleware for every request: an id, a size limit, the check of its origin, one log line."""

import re
import time
from collections.abc import Collection, Iterator
from http import HTTPStatus

import structlog
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.contract.text import is_storable, storable
from app.errors import AccrueError, Forbidden, InvalidRequest, TooLarge, TooManyRequests
from app.observability.prometheus import Exposition
from app.security.audit import AuditLog, AuditRecord
from app.security.authentication import admit, bearer
from app.security.keys import Caller, is_well_formed
from app.security.local import foreign_page, refusal
from app.security.scopes import lacks_scope
from app.settings import LOOPBACK, Settings
from app.storage.ids import request_id
from app.web.body_limits import BodyLimits, is_file_upload, too_large
from app.web.content_type import has_other_charset, is_multipart
from app.web.error_bodies import accrue_error, database_unavailable, problem_response, unexpected
from app.web.latency import LatencyGauge

log = structlog.get_logger("accrue.service")

NATIVE = "/gradient-accumulation"
_ALTERNATIVE_PREFIX = "/api/v1"

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_SENT_AT_ONCE = 2**15
"""Responses are sent in parts of this many bytes, so that a slow reader keeps only one part in memory."""
CALCULATORS = "calculators"
"""The tag of routes that change nothing, although their method is POST."""
_PAGES = ("/", "/docs")
_PUBLIC_PATHS = ("/healthz", "/readyz")
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
        self.bodies = BodyLimits(settings)

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
        try:
            end = self.bodies.begin(scope, headers, key_id)
        except TooManyRequests as error:
            response = accrue_error(Request(scope), error)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        try:
            async with self.bodies.limited(scope, receive, send, key_id) as (limited, answering):
                await self.app(scope, limited, answering)
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
        why = self._foreign(headers, is_page=path in _PAGES)
        if why is not None:
            return problem_response(request, 403, Forbidden.code, Forbidden.title, why)
        limit, length = self.bodies.most_bytes(scope), headers.get("content-length", "0")
        if length.isdigit() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit):
            return problem_response(
                request, TooLarge.status, TooLarge.code, TooLarge.title, too_large(scope, limit),
                param="body", headers={"Connection": "close"},
            )  # fmt: skip
        if scope["method"] in _READ_METHODS or path in _PUBLIC_PATHS:
            return None  # without a body, the route's own check of the key is early enough
        is_upload = is_file_upload(scope)
        try:
            caller = await admit(request)
            if is_upload and not caller.may("write"):  # before the upload is received
                raise Forbidden(lacks_scope("write"))
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

    def _foreign(self, headers: Headers, *, is_page: bool) -> str | None:
        """The reason why a request may come from a page of another site, or None."""
        own = bearer(headers) or ""
        if self.settings.oidc_issuer is not None and not self.is_mounted and own and not is_well_formed(own):
            return foreign_page(headers, self.settings.allowed_origins, is_page=is_page)
        if self._skips_origin_check(headers):
            return None
        return refusal(headers, self.settings.allowed_origins, is_page=is_page)

    def _skips_origin_check(self, headers: Headers) -> bool:
        """Whether the Host and Origin checks are skipped: the request carries a well-formed key, or the
        service is not limited to loopback."""
        on_loopback = self.settings.host in LOOPBACK and not self.is_mounted
        return not on_loopback or is_well_formed(bearer(headers) or "")


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
    """The route's path template without the prefix of our own routes, such as `/training/{training_id}`;
    there are only a few of them. A path that does not take the request's method counts as no route."""
    route = scope.get("route")
    takes: Collection[str] | None = getattr(route, "methods", None)
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    if takes is not None and method not in takes:
        return "none"
    path: str = getattr(route, "path", "none")
    return path.removeprefix(NATIVE)


def _add_headers(headers: MutableHeaders, identifier: str) -> None:
    """Adds the request's id, and headers that stop a browser from sniffing, framing or executing the
    response."""
    headers["x-request-id"] = identifier
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["X-Frame-Options"] = "DENY"
    if not headers.get("content-type", "").startswith("text/html"):
        headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"


def _address(host: str) -> str:
    """A client's address, or `?` if a proxy passed on something that is not an address."""
    return host if _AN_ADDRESS.fullmatch(host) else "?"
