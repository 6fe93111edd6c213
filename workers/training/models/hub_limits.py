"""Limits what a hub, or a mirror of it, can do to the download of a model: it is not trusted.

huggingface_hub makes the requests. Its HTTP client gets hooks here that check each request's destination and
count each answer's bytes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from app.contract.public_addresses import NotPublic, address_of_redirect

LISTING_BYTES = 32 * 2**20
"""The limit of all answers that describe files, together."""
_BYTES_PER_PARAMETER = 16
_BYTES_OF_OTHER_FILES = 2 * 2**30
_GRACE_SECONDS = 120.0
_LEAST_BYTES_PER_SECOND = 2**16
"""A download that is slower than this on average, after the grace period, is given up."""
_ORIGIN_PORTS = {"https": 443, "http": 80}


class TooSlow(ConnectionError):
    """The hub answers too slowly: a later attempt may succeed."""


class TooMuch(ValueError):
    """The hub sends more than the model can need."""


class NotFollowed(ValueError):
    """The hub redirects to an address that is neither its own nor on the public internet."""


class DownloadLimits:
    """Limits for the download of one model.

    Args:
        endpoint: the hub's address.
        parameters: those of the model, from its config.
        now: the monotonic clock, in seconds.
    """

    def __init__(self, endpoint: str, parameters: int, now: Callable[[], float] = time.monotonic) -> None:
        self._endpoint, self._now = endpoint, now
        self._most = _BYTES_PER_PARAMETER * parameters + _BYTES_OF_OTHER_FILES
        self._received = self._described = 0
        self._began: float | None = None
        self._counting = threading.Lock()

    def apply(self) -> None:
        """Limits what huggingface_hub downloads in this process from now on."""
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory

        def limited() -> Any:
            client = default_client_factory()
            hooks = client.event_hooks
            client.event_hooks = {
                "request": [*hooks.get("request", []), self.check_request],
                "response": [*hooks.get("response", []), self.count_response],
            }
            client.timeout = _GRACE_SECONDS
            client.headers["Accept-Encoding"] = "identity"
            return client

        set_client_factory(limited)

    def check_request(self, request: Any) -> None:
        """A hook for each request, those that follow redirects too: it leads to the hub or to the public
        internet, and connects to the address that was checked.

        Raises:
            NotFollowed: it leads elsewhere, such as to this machine.
        """
        import huggingface_hub.utils._http as hub

        http: Any = getattr(hub, "httpx2", None) or getattr(hub, "httpx", None)
        url, home = request.url, http.URL(self._endpoint)
        if _origin(url) == _origin(home):
            return
        try:
            address = address_of_redirect(url.scheme, url.host, url.port, from_scheme=home.scheme)
        except NotPublic as error:
            raise NotFollowed(f"the hub redirects to {error}") from None
        if address is None:
            return
        request.headers["Host"] = url.netloc.decode()
        request.extensions = {**request.extensions, "sni_hostname": url.host}
        request.url = url.copy_with(host=address)

    def count_response(self, response: Any) -> None:
        """A hook for each response: its bytes are counted as they arrive.

        Raises:
            TooMuch: it is compressed, so that a few bytes may stand for many.
        """
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TooMuch("the hub sent a compressed response that was not requested")
        described = response.request.url.path.startswith("/api/")
        stream, count = response.stream, self._count

        class Counted(type(stream)):  # type: ignore[misc]  # the client checks the kind of its stream
            def __init__(self) -> None:
                pass

            def __iter__(self) -> Iterator[bytes]:
                for block in stream:
                    count(len(block), described=described)
                    yield block

            def close(self) -> None:
                stream.close()

        response.stream = Counted()

    def _count(self, received: int, *, described: bool) -> None:
        """Counts bytes that have arrived.

        Raises:
            TooMuch, TooSlow: there are too many, or they arrive too slowly.
        """
        with self._counting:
            self._began = self._now() if self._began is None else self._began
            self._received += received
            self._described += received if described else 0
            seconds = self._now() - self._began
        if self._described > LISTING_BYTES:
            raise TooMuch(f"the hub describes the files in more than {LISTING_BYTES // 2**20} MiB")
        if self._received > self._most:
            raise TooMuch(
                f"the hub sends more than {self._most / 2**30:.1f} GiB, which this model cannot need"
            )
        if seconds > _GRACE_SECONDS and self._received < seconds * _LEAST_BYTES_PER_SECOND:
            raise TooSlow(
                f"the hub sends fewer than {_LEAST_BYTES_PER_SECOND // 1024} KiB a second: try again later"
            )


def _origin(url: Any) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _ORIGIN_PORTS.get(url.scheme)
