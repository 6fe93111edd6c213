"""The one error body: a problem document (RFC 9457) that the openai client understands too."""

import errno
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from app.errors import (
    AccrueError,
    Conflict,
    DiskFull,
    QuotaExceeded,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from app.storage.database import is_unavailable
from app.storage.disk import is_full
from app.web.content_type import is_multipart
from app.web.validation_errors import FieldProblem, field_problems

OPENAI = "OpenAI"
"""The prefix of the tags of the OpenAI-compatible routes."""

log = structlog.get_logger("accrue.service")


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Problem(BaseModel):
    """Every error of every route."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[FieldProblem] = []
    error: OpenAIError


def problem_response(
    request: Request,
    status: int,
    code: str,
    title: str,
    detail: str,
    *,
    errors: Sequence[FieldProblem] = (),
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The error body, for a route or a middleware."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    body = Problem(
        type=f"https://accrue.invalid/problems/{code}",
        title=title,
        status=status,
        detail=detail,
        instance=request.url.path,
        errors=list(errors),
        error=OpenAIError(message=detail, type=kind, param=param, code=code),
    )
    return JSONResponse(
        body.model_dump(), status, media_type="application/problem+json", headers=dict(headers or {})
    )


def install(app: FastAPI) -> None:
    """Maps every error that can leave a route to the one body."""
    app.add_exception_handler(AccrueError, accrue_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OperationalError, database_unavailable)
    app.add_exception_handler(InternalError, _internal_database_error)
    app.add_exception_handler(PoolTimeout, database_unavailable)
    app.add_exception_handler(IntegrityError, _in_use)
    app.add_exception_handler(OSError, _os_error)


def _status(request: Request, status: int) -> int:
    """The status to send: OpenAI's clients expect 400 instead of 422."""
    tags: list[str] = getattr(request.scope.get("route"), "tags", [])
    return 400 if status == 422 and any(tag.startswith(OPENAI) for tag in tags) else status


def accrue_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AccrueError)
    fields = [FieldProblem(field=error.field, message=error.message)] if error.field else []
    headers = {"x-should-retry": "false"} if isinstance(error, Conflict | QuotaExceeded) else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooManyRequests):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return problem_response(
        request, _status(request, error.status), error.code, error.title, error.message,
        errors=fields, param=error.field, headers=headers,
    )  # fmt: skip


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fields = field_problems(error.errors(), _body_of(request))
    detail = "; ".join(f"{problem.field}: {problem.message}" for problem in fields[:5])
    detail += "; and more" if len(fields) > 5 else ""
    detail = detail if detail.endswith("?") else f"{detail}."
    first = fields[0].field if fields else None
    return problem_response(
        request,
        _status(request, 422),
        "invalid_value",
        "Unprocessable request",
        detail,
        errors=fields,
        param=first,
    )


def _body_of(request: Request) -> type[BaseModel] | None:
    """The model of the route's body."""
    dependant = getattr(request.scope.get("route"), "dependant", None)
    for field in dependant.body_params if dependant is not None else ():
        annotation = field.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail = {
        404: f"No route matches {request.url.path}: see /docs for the available routes.",
        405: f"{request.method} is not allowed at {request.url.path}: see /docs.",
    }.get(error.status_code, str(error.detail))
    if detail == "There was an error parsing the body":
        detail = (
            "The body is not a valid form: send the file as multipart/form-data, in the field file."
            if is_multipart(request.headers)
            else "The body is not valid JSON: it must be UTF-8, not nested too deeply, and without very long "
            "numbers."
        )
    code = TooLarge.code if status == TooLarge.status else status.phrase.lower().replace(" ", "_")
    return problem_response(request, status, code, status.phrase, detail, headers=error.headers)


def _in_use(request: Request, error: Exception) -> JSONResponse:
    log.warning("conflicting change", error=str(getattr(error, "orig", error)))
    return problem_response(
        request, Conflict.status, Conflict.code, Conflict.title,
        "Another request changed the same object at the same time: fetch it again, then repeat this request.",
    )  # fmt: skip


def database_unavailable(request: Request, error: Exception) -> JSONResponse:
    if is_full(error):
        return _disk_full(request, error)
    log.error("the database did not answer", error=str(getattr(error, "orig", error)))
    return problem_response(
        request, 503, Unavailable.code, Unavailable.title,
        "The database does not answer right now: try again in a moment.", headers={"Retry-After": "2"},
    )  # fmt: skip


def _internal_database_error(request: Request, error: Exception) -> JSONResponse:
    """PostgreSQL closes the connection of a process that was suspended within a transaction."""
    if isinstance(error, InternalError) and is_unavailable(error):
        return database_unavailable(request, error)
    raise error


def _os_error(request: Request, error: Exception) -> JSONResponse:
    if is_full(error):
        return _disk_full(request, error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.error("too many files are open", error=str(error))
        return problem_response(
            request, 503, Unavailable.code, Unavailable.title,
            "The service is at its limit of open files and connections: try again in a moment.",
            headers={"Retry-After": "5"},
        )  # fmt: skip
    raise error


def _disk_full(request: Request, error: Exception) -> JSONResponse:
    log.error("the disk is full", error=str(error))
    return problem_response(
        request, DiskFull.status, DiskFull.code, DiskFull.title,
        "The disk is full: nothing was stored. Delete files or ended jobs, or give the data folder more "
        "space.",
    )  # fmt: skip


def unexpected(request: Request) -> JSONResponse:
    """The response after an unexpected error in the service's own code."""
    return problem_response(
        request, 500, "internal_error", "Internal error",
        "Internal error: the service's log has the details under this request's id.",
    )  # fmt: skip
