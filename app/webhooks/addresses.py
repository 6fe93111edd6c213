"""Checks webhook addresses: the host is resolved once, and the connection uses that same address."""

import socket
from urllib.parse import urlsplit

from app.contract.public_addresses import NotPublic, resolve_host
from app.errors import InvalidRequest


class NotAllowed(InvalidRequest):
    """The webhook's address is not allowed."""

    code = "webhook_not_allowed"


def resolve(url: str, *, private: bool) -> str:
    """Resolves a URL's host to one of its current addresses.

    Args:
        private: whether private addresses, such as loopback and the local network, are allowed too.

    Raises:
        NotAllowed: the host has no address, or one that is not on the public internet.
    """
    host, port = _host_and_port(url)
    try:
        return resolve_host(host, port, private=private)
    except NotPublic as error:
        raise NotAllowed(str(error)) from None


def check(url: str, *, private: bool) -> None:
    """Checks a host that is itself an IP address, without resolving anything.

    Raises:
        NotAllowed: the address is not allowed.
    """
    host, _ = _host_and_port(url)
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return  # a name, which is resolved when there is something to deliver
    resolve(url, private=private)


def _host_and_port(url: str) -> tuple[str, int]:
    """The host and port of a URL.

    Raises:
        NotAllowed: the URL is invalid or has no host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        host.encode("idna")
    except ValueError as error:
        raise NotAllowed(f"it is not a valid URL ({error})") from None
    if not host:
        raise NotAllowed("it has no host name")
    return host, port
