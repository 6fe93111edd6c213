"""The errors that people see. Each carries its HTTP status, its code, and what to do.

AccrueError
├── BadSetting            the process cannot start
├── InvalidRequest  400   a value that no schema can check
│   └── Unprocessable 422 the same, for a named field
├── Unauthorized    401   no key, or one that opens nothing
├── NotFound        404
├── Conflict        409   the state of a job does not allow it; a retry cannot heal it
├── TooLarge        413
├── TooManyRequests 429   a key asks too often, or has too much waiting
├── Forbidden       403   a request from elsewhere than this machine, or beyond its key's scopes
├── Unavailable     503   this service cannot do it now
│   └── ReplacedDatabase  its database's file is another one by now
└── DiskFull        507   there is no room for it
"""

from typing import ClassVar


class AccrueError(Exception):
    """Something a person can mend; the message says how."""

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


class Unauthorized(AccrueError):
    status = 401
    code = "invalid_api_key"
    title = "Unauthorized"


class NotFound(AccrueError):
    status = 404
    code = "not_found"
    title = "Not found"


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


class Unavailable(AccrueError):
    status = 503
    code = "unavailable"
    title = "Unavailable"


class ReplacedDatabase(Unavailable):
    """The database's file was deleted or replaced under a process that has it open."""

    title = "Database replaced"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The database file {what} while the service was running: nothing is written any more. Stop "
            "service and workers, put the database in place, and start them again."
        )


class DiskFull(AccrueError):
    status = 507
    code = "disk_full"
    title = "No room"
