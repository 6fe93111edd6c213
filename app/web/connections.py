"""The maximum number of connections, from that of open files."""

import resource

from app.web.body_limits import MAX_UPLOADS
from app.web.downloads import MAX_OPEN_FILES

MAX_CONNECTIONS = 4000
_DATABASE_AND_LOGS = 256
_OTHER_FILES = _DATABASE_AND_LOGS + MAX_OPEN_FILES + 2 * MAX_UPLOADS
"""The maximum number of open files besides connections. An upload has two: as received, and as stored."""


def raise_connection_limit() -> int:
    """Raises the limit of open files. Returns the number of connections beyond which a new one replaces
    another."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connection_limit()


def connection_limit() -> int:
    """The number of connections that the present limit of open files allows, at most `MAX_CONNECTIONS`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_CONNECTIONS + _OTHER_FILES:
        return MAX_CONNECTIONS
    return max(soft - _OTHER_FILES, soft // 2)
