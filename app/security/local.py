"""Restricts a service without keys to this machine, and stops web pages from using it through a browser."""

import re
from collections.abc import Collection

from starlette.datastructures import Headers

from app.errors import BadSetting
from app.security.keys import any_made
from app.settings import LOOPBACK
from app.storage.database import Database

_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::[0-9]{1,5})?", re.ASCII)


def require_keys_off_loopback(host: str, database: Database) -> None:
    """Checks that a service that other machines can reach, and that has no sign-in provider, has a key.

    Raises:
        BadSetting: other machines can reach the address, and no key exists yet.
    """
    if host in LOOPBACK:
        return
    with database.reading() as session:
        if not any_made(session):
            raise BadSetting(
                f"ACCRUE_HOST is {host}, which other machines can reach: first create a key (accrue keys "
                "create NAME) or set ACCRUE_OIDC_ISSUER. Without them, the service listens on 127.0.0.1 only."
            )


def refusal(headers: Headers, allowed_origins: Collection[str] = (), *, is_page: bool = False) -> str | None:
    """The reason why a request is not from this machine's own user, or None if it is.

    A foreign Host header means DNS rebinding: another name was made to resolve to this machine.

    Args:
        is_page: the request is for one of the service's own pages, which a link elsewhere may lead to.
    """
    host = headers.get("host", "")
    if len(headers.getlist("host")) == 1 and _host_of(host) not in LOOPBACK:
        return f"The Host {host[:100]!r} is not this machine: use http://127.0.0.1."
    return foreign_page(headers, allowed_origins, is_page=is_page)


def foreign_page(headers: Headers, allowed_origins: Collection[str], *, is_page: bool) -> str | None:
    """The reason why a request is from a page of another site or port, or None if it is not: a foreign
    Origin, or a Sec-Fetch-Site header other than same-origin or none.

    A proxy that signs users in adds their tokens to whatever their browsers send, so this also applies to
    requests with tokens.
    """
    for name in ("host", "origin", "sec-fetch-site"):
        if len(headers.getlist(name)) > 1:
            return f"The header {name} is given more than once."
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None:
        own = origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
        if own or origin in allowed_origins:
            return None
        return f"Requests from the origin {origin[:100]} are not allowed: see ACCRUE_CORS_ORIGINS."
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    if site in (None, "same-origin", "none") or (is_page and mode == "navigate"):
        return None
    return "Requests from pages of other sites are not allowed: see ACCRUE_CORS_ORIGINS."


def _host_of(header: str) -> str | None:
    """The host in a Host header, without its port; None if the header is malformed."""
    found = _HOST.fullmatch(header)
    return (found["name"] or found["ipv6"]).lower() if found else None
