"""Whether an error says that there is no room."""

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError

_POSTGRESQL_DISK_FULL = "53100"


def is_full(error: BaseException) -> bool:
    """Of a file's, SQLite's or PostgreSQL's error."""
    if isinstance(error, DBAPIError):
        error = error.orig or error
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlstate", None) == _POSTGRESQL_DISK_FULL
