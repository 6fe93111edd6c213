"""Open to this machine, and to nothing else: no web page can drive the service through a browser."""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from app.database import Database
from app.errors import BadSetting
from app.security.keys import any_made
from app.settings import LOOPBACK


def require_keys_off_loopback(host: str, database: Database) -> None:
    """Raises:
    BadSetting: the address can be reached from elsewhere, and no key was made to ask for.
    """
    if host in LOOPBACK:
        return
    with database.reading() as session:
        if not any_made(session):
            raise BadSetting(
                f"ACCRUE_HOST is {host}: make a key first (accrue keys create NAME), since others than this "
                "machine could reach the service. Without keys it serves 127.0.0.1 only."
            )


def refusal(headers: Headers, allowed_origins: Collection[str] = ()) -> str | None:
    """Why a request does not come from this machine's own user; null if it does.

    A foreign Host means a name that was made to point here (DNS rebinding); a foreign Origin means a
    page of another site.
    """
    if _host_of(f"//{headers.get('host', '')}") not in LOOPBACK:
        return f"The Host {headers.get('host', '')!r} is not this machine: use http://127.0.0.1."
    origin = headers.get("origin")
    if origin is not None and origin not in allowed_origins and _host_of(origin) not in LOOPBACK:
        return f"Requests from the origin {origin} are not allowed."
    return None


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
