"""Requests to the hub with limits of bytes and time.

The hub, or a mirror that HF_ENDPOINT names, is not trusted: nothing in an answer becomes a path, redirects
lead only to the hub or to the public internet, and the token is sent only to the hub.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from app.contract.public_addresses import NotPublic, address_of_redirect

_REDIRECTS = 5
_READ_SECONDS = 10.0
_GRACE_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 4096
"""A download that is slower than this after `_GRACE_SECONDS` is given up."""
_MOVED = {301, 302, 303, 307, 308}


class HubResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class HubNotAnswered(Exception):
    """There is no usable answer; the message continues "the hub …"."""


def get(url: str, token: str | None, *, most_bytes: int, seconds: float) -> HubResponse:
    """The response to a GET. Content is cut off one byte after `most_bytes`, so that the caller can tell that
    it is too long.

    Raises:
        HubNotAnswered: the hub cannot be reached, answers too slowly, or redirects to a forbidden address.
    """
    content = bytearray()

    def keep(block: bytes) -> bool:
        content.extend(block[: most_bytes + 1 - len(content)])
        return len(content) <= most_bytes

    status, headers = _run(_stream(url, token, keep, seconds))
    return HubResponse(status, headers, bytes(content))


def download(url: str, token: str | None, target: Path, *, most_bytes: int, seconds: float) -> HubResponse:
    """Writes the content of an answer to a file, at most one byte more than `most_bytes`. Returns the answer
    without it.

    Raises:
        HubNotAnswered: as in `get`, or the content is slow.
        OSError: the file cannot be written.
    """
    started, written = time.monotonic(), 0
    with target.open("wb") as file:

        def write(block: bytes) -> bool:
            nonlocal written
            written += file.write(block[: most_bytes + 1 - written])
            elapsed = time.monotonic() - started
            if elapsed > _GRACE_SECONDS and written < elapsed * _LEAST_BYTES_PER_SECOND:
                raise TimeoutError
            return written <= most_bytes

        status, headers = _run(_stream(url, token, write, seconds))
    return HubResponse(status, headers, b"")


def _run(requested: Any) -> tuple[int, Mapping[str, str]]:
    try:
        found: tuple[int, Mapping[str, str]] = asyncio.run(requested)
    except (HubNotAnswered, MemoryError):
        raise
    except TimeoutError:
        raise HubNotAnswered("answers too slowly") from None
    except OSError as error:
        if error.filename is not None or error.errno in _OF_THE_DISK:
            raise
        raise HubNotAnswered("cannot be reached from here") from None
    except Exception:  # an address or answer that the HTTP library cannot read raises anything
        raise HubNotAnswered("cannot be reached from here") from None
    return found


_OF_THE_DISK = {28, 122, 27, 30, 5}
"""ENOSPC, EDQUOT, EFBIG, EROFS, EIO."""


async def _stream(
    url: str, token: str | None, receive: Callable[[bytes], bool], seconds: float
) -> tuple[int, Mapping[str, str]]:
    """Passes the content of a response to `receive`, until that returns False."""
    import httpx2 as httpx
    from huggingface_hub import constants

    hub, address = _origin(constants.ENDPOINT), None
    async with asyncio.timeout(seconds), httpx.AsyncClient(follow_redirects=False) as client:
        for _ in range(_REDIRECTS + 1):
            own = {"Authorization": f"Bearer {token}"} if token and _origin(url) == hub else {}
            headers, named = {"Accept-Encoding": "identity", **own}, httpx.URL(url)
            if address is not None:
                headers["Host"] = named.netloc.decode()
            async with client.stream(
                "GET",
                named if address is None else named.copy_with(host=address),
                headers=headers,
                timeout=min(seconds, _READ_SECONDS),
                extensions=None if address is None else {"sni_hostname": named.host},
            ) as answer:
                location = answer.headers.get("location")
                if answer.status_code not in _MOVED or location is None:
                    if answer.status_code == HTTPStatus.OK:
                        async for block in answer.aiter_raw():
                            if not receive(block):
                                break
                    return answer.status_code, dict(answer.headers)
                url = urljoin(url, location)
                address = await asyncio.to_thread(_address_of_redirect, url, hub)
    raise HubNotAnswered("redirects too often")


def _address_of_redirect(url: str, hub: tuple[str, str, int | None]) -> str | None:
    """The address that a redirect leads to; None if it leads to the hub itself, or a proxy connects.

    Raises:
        HubNotAnswered: it leads neither to the hub nor to the public internet.
    """
    scheme, host, port = origin = _origin(url)
    if origin == hub:
        return None
    try:
        return address_of_redirect(scheme, host, port, from_scheme=hub[0])
    except NotPublic as error:
        raise HubNotAnswered(f"redirects to {error}") from None


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)
