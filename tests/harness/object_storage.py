"""An S3 server on loopback, with credentials that mean nothing."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2 as httpx

from tests.harness.runs import until
from tests.harness.service import free_port

BUCKET = "accrue"


@dataclass(frozen=True)
class S3:
    """A running server with an empty bucket."""

    port: int
    process: "subprocess.Popen[bytes]"
    url = f"s3://{BUCKET}/jobs"

    def variables(self, port: int | None = None) -> dict[str, str]:
        """The environment of a process that uses it, perhaps through another port."""
        return {
            "ACCRUE_OBJECT_STORAGE": self.url,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3_server() -> Iterator[S3]:
    """A moto server."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: _answers(port), 30)
        assert httpx.put(f"http://127.0.0.1:{port}/{BUCKET}").is_success
        yield S3(port, process)
    finally:
        process.terminate()
        process.wait(10)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/moto-api/").is_success
    except httpx.HTTPError:
        return False
