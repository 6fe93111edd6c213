"""A cheap load generator: keep-alive connections that send the next request after each answer."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvloop


@dataclass
class Load:
    """The result of a round of requests."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds from a request's first byte to its answer's last."""
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def get(path: str) -> bytes:
    """A GET request, in bytes."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    """A POST request with a JSON body, in bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def send_requests(port: int, requests: Iterator[bytes], connections: int, seconds: float) -> Load:
    """Sends requests over several connections for some seconds, and reads every response completely."""
    return uvloop.run(_ask(port, requests, connections, seconds))


async def _ask(port: int, requests: Iterator[bytes], connections: int, seconds: float) -> Load:
    load = Load()
    loop = asyncio.get_running_loop()
    began = time.perf_counter()

    def following() -> bytes | None:
        return next(requests, None) if time.perf_counter() - began < seconds else None

    clients = [_Client(load, following, loop.create_future()) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    for client in clients:
        await client.done
    load.seconds = time.perf_counter() - began
    return load


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load, following: Callable[[], bytes | None], done: asyncio.Future[None]) -> None:
        self._load, self._following, self.done = load, following, done
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop has its own class
        self._ask()

    def _ask(self) -> None:
        request = self._following()
        if request is None:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)
            return
        self._asked_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        name = b"content-length: "
        at = head.lower().index(name) + len(name)
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._received = b""
        self._load.latencies.append(time.perf_counter() - self._asked_at)
        self._load.statuses[int(head[9:12])] += 1
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the service closed the connection"))
