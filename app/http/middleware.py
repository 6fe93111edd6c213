"""What happens to every request: an id, a size limit, the look at where it comes from, one log line."""

import re
import time
from http import HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Forbidden, TooLarge
from app.exposition import Exposition
from app.http.latency import LatencyGauge
from app.http.problems import problem_response, unexpected
from app.ids import request_id
from app.security.audit import AuditLog, Deed
from app.security.authentication import bearer
from app.security.keys import Caller, is_well_formed
from app.security.local import refusal
from app.settings import LOOPBACK, Settings

log = structlog.get_logger("accrue.service")

NATIVE = "/gradient-accumulation"
_ALSO_UNDER = "/api/v1"

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_FORM_OVERHEAD = 2**16
_READING = ("GET", "HEAD", "OPTIONS")
_LONGEST_PATH = 500


class EveryRequest:
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
            is_mounted: another application lets nobody in whom it does not know.
        """
        self.app = app
        self.audit = audit
        self.exposition = exposition
        self.is_mounted = is_mounted
        self.settings = settings
        self.latency = latency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        _by_its_first_name(scope)
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
            await send(message)

        limit = self._limit(headers)
        try:
            await self._answer(scope, _limited(receive, limit), send_with_id, headers, limit)
        except Exception as error:
            log.exception("unexpected error", path=scope["path"], exc_info=error)
            if not started:
                await unexpected(Request(scope))(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            self.latency.add(seconds)
            self.exposition.answered(scope["method"], _template(scope), status, seconds)
            tell = log.debug if scope["method"] in _READING and status < HTTPStatus.BAD_REQUEST else log.info
            tell("request", method=scope["method"], path=scope["path"], status=status,
                 milliseconds=round(1000 * seconds, 1))  # fmt: skip
            self._note(scope, status, identifier)
            structlog.contextvars.clear_contextvars()

    def _note(self, scope: Scope, status: int, identifier: str) -> None:
        """Into the audit log, where it belongs there."""
        if scope["method"] in _READING and not self.settings.audit_reads:
            return
        caller: Caller | None = scope.get("state", {}).get("caller")
        key_id = caller.key_id if caller is not None else None
        address = scope["client"][0] if scope.get("client") else "?"
        path = scope["path"][:_LONGEST_PATH]
        self.audit.note(Deed(time.time(), key_id, scope["method"], path, status, address, identifier))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Headers, limit: int) -> None:
        refused = None if self._is_for_others(headers) else refusal(headers, self.settings.allowed_origins)
        length = headers.get("content-length", "0")
        if refused is not None:
            response = problem_response(Request(scope), 403, Forbidden.code, Forbidden.title, refused)
            await response(scope, receive, send)
        elif length.isdigit() and int(length) > limit:
            response = problem_response(
                Request(scope),
                TooLarge.status,
                TooLarge.code,
                TooLarge.title,
                _too_large(limit),
                param="body",
                headers={"Connection": "close"},
            )
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_for_others(self, headers: Headers) -> bool:
        """Who shows a key, or is bound to more than loopback, needs no name of this machine."""
        on_loopback = self.settings.host in LOOPBACK and not self.is_mounted
        return not on_loopback or is_well_formed(bearer(headers) or "")

    def _limit(self, headers: Headers) -> int:
        """Bytes of the body: a file's for an upload, a document's for everything else."""
        if headers.get("content-type", "").startswith("multipart/form-data"):
            return self.settings.max_file_bytes + _FORM_OVERHEAD
        return self.settings.max_body_bytes


def _by_its_first_name(scope: Scope) -> None:
    """What is asked for under `/api/v1` is looked for without it."""
    root = scope.get("root_path", "")
    if scope["path"].startswith(f"{root}{_ALSO_UNDER}{NATIVE}"):
        scope["path"] = root + scope["path"][len(root) + len(_ALSO_UNDER) :]


def _template(scope: Scope) -> str:
    """The route within its surface, with its parameters' names: of those there are few."""
    return getattr(scope.get("route"), "path", "none")


def _add_headers(headers: MutableHeaders, identifier: str) -> None:
    """The request's id, and what keeps a browser from making more of an answer than it is."""
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


def _limited(receive: Receive, limit: int) -> Receive:
    """Counts what arrives, for bodies that do not say how long they are."""
    taken = 0

    async def receive_limited() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise HTTPException(TooLarge.status, _too_large(limit))
        return message

    return receive_limited
