"""Which network addresses are on the public internet. Uses only the standard library."""

import ipaddress
import socket
from urllib.request import getproxies, proxy_bypass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 behind a gateway (RFC 6052)."""

_RESERVED_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's own service, for its virtual machines
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
        "192.88.99.0/24",  # 6to4 relays, given up (RFC 7526)
        "3fff::/20",  # documentation (RFC 9637)
    )
)
"""Addresses that look public and are not."""

_ISATAP = (0x00005EFE, 0x02005EFE)
"""The third 32 bits of an IPv6 address whose last 32 bits are an IPv4 address (RFC 5214)."""


class NotPublic(ValueError):
    """A host has no address, or one that is not on the public internet; the message says which."""


class NoAddress(NotPublic):
    """A host has no address that this machine can find."""


def resolve_host(host: str, port: int | None, *, private: bool = False) -> str:
    """Resolves a host to one of its current addresses.

    Args:
        private: whether private addresses, such as loopback and the local network, are allowed too.

    Raises:
        NotPublic: the host has no address, or one that is not on the public internet.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoAddress(
            f"the host {host} cannot be found ({getattr(error, 'strerror', None) or 'invalid'})"
        ) from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if not addresses:
        raise NoAddress(f"the host {host} has no address")
    refused = [address for address in addresses if not private and not is_public(address)]
    if refused:
        raise NotPublic(f"the host {host} is not on the public internet ({refused[0]})")
    return str(addresses[0])


def address_of_redirect(scheme: str, host: str, port: int | None, *, from_scheme: str) -> str | None:
    """The address to connect to where a redirect leads away from the hub. The connection must use that
    address, since the name could stand for another one a moment later.

    If this machine can resolve the host, its address must be public even if a proxy is set: HTTP clients read
    NO_PROXY in different ways, so the request may bypass the proxy.

    Args:
        from_scheme: the scheme of the hub's own address; only from plain http may a redirect lead to plain
            http.

    Returns:
        None if a proxy resolves the name and makes the connection.

    Raises:
        NotPublic: it does not lead to the public internet, or not by https.
    """
    if scheme != "https" and not (scheme == from_scheme == "http"):
        raise NotPublic("an address that is not https")
    proxies = getproxies()
    by_proxy = bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host)
    try:
        address = resolve_host(host, port)
    except NotPublic as error:
        if by_proxy and isinstance(error, NoAddress):
            return None
        raise NotPublic("an address that is not on the public internet") from None
    return None if by_proxy else address


def is_public(address: Address) -> bool:
    """Whether it is a public internet address; an IPv4 address within an IPv6 one is checked as such."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not is_public(inner):
            return False
        if address.ipv4_mapped or address.sixtofour or address.teredo or address in _NAT64:
            return True
        if address.is_site_local:  # fec0::/10, deprecated, and still private
            return False
    if any(
        address in network for network in _RESERVED_NETWORKS
    ):  # an address of the other IP version is in none of them
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
