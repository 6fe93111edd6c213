"""The errors that people see. Each carries its HTTP status, its code, and what to do.

AccrueError
├── BadSetting            the process cannot start
├── InvalidRequest  400   a value that no schema can check
│   ├── Unprocessable 422 the same, for a named field
│   ├── ContextTooLong    a prompt that does not fit in the model's context
│   └── NoChatTemplate    a conversation with a model that has no template for it
├── Unauthorized    401   no API key, or an invalid one
├── NotFound        404
│   └── UnknownModel      no model has that name
├── Conflict        409   the current state (of a job, a file, the workers, …) does not allow the operation
├── TooLarge        413
├── TooManyRequests 429   a key has reached its rate limit, or its limit of concurrent requests
├── QuotaExceeded   429   a key has too many waiting jobs or stored bytes, or has used up its device hours
├── Forbidden       403   another machine or web page while no key exists, or beyond a key's scopes
├── ModelFailed     500   a model failed while it answered
├── Unavailable     503   the service cannot do it at the moment
│   └── ReplacedDatabase  the database file was deleted or replaced
└── DiskFull        507   the disk is full
"""

from typing import ClassVar


class AccrueError(Exception):
    """An error that the user can fix; the message says how."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class BadSetting(AccrueError):
    """A setting with which the process cannot start."""

    code = "bad_setting"


class InvalidRequest(AccrueError):
    status = 400
    code = "invalid_request"
    title = "Invalid request"


class Unprocessable(InvalidRequest):
    status = 422
    code = "invalid_value"
    title = "Unprocessable request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"
    title = "Context too long"


class NoChatTemplate(InvalidRequest):
    code = "no_chat_template"


class Unauthorized(AccrueError):
    status = 401
    code = "invalid_api_key"
    title = "Unauthorized"


class NotFound(AccrueError):
    status = 404
    code = "not_found"
    title = "Not found"


class UnknownModel(NotFound):
    code = "model_not_found"


class Conflict(AccrueError):
    status = 409
    code = "conflict"
    title = "Conflict"


class TooLarge(AccrueError):
    status = 413
    code = "too_large"
    title = "Too large"


class TooManyRequests(AccrueError):
    status = 429
    code = "rate_limit_exceeded"
    title = "Too many requests"

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(AccrueError):
    status = 429
    code = "quota_exceeded"
    title = "Quota exceeded"


class Forbidden(AccrueError):
    status = 403
    code = "forbidden"
    title = "Forbidden"


class ModelFailed(AccrueError):
    status = 500
    code = "internal_error"
    title = "Internal error"


class Unavailable(AccrueError):
    status = 503
    code = "unavailable"
    title = "Unavailable"


class ReplacedDatabase(Unavailable):
    """The database's file was deleted or replaced under a process that has it open."""

    title = "Database replaced"

    def __init__(self, change: str) -> None:
        super().__init__(
            f"The database file {change} while the service was running: nothing is being stored. Stop "
            "the service and the workers, restore the database file, and start them again."
        )


class DiskFull(AccrueError):
    status = 507
    code = "disk_full"
    title = "Disk full"
