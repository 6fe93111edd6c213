"""Notices of a metadata service, which a small server stands in for."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.harness.runs import until
from workers.spot_notices import Provider, SpotNotices


class Metadata:
    """A metadata service: what it answers, and which requests it has got."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                metadata.asked.append((self.command, self.path, dict(self.headers)))
                status, body = metadata.answers.get(self.path.split("?")[0], (404, ""))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_PUT = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.server.shutdown()
    made.server.server_close()


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents"
PREEMPT = '{"Events": [{"EventType": "Preempt", "EventStatus": "Scheduled"}]}'

Cases = pytest.mark.parametrize(
    ("provider", "path", "quiet", "notice"),
    [
        ("aws", AWS, (404, ""), '{"action": "terminate", "time": "2026-11-26T08:22:00Z"}'),
        ("gcp", GCP, (200, "FALSE"), "TRUE"),
        ("azure", AZURE, (200, '{"Events": [{"EventType": "Reboot"}]}'), PREEMPT),
    ],
)


@pytest.fixture
def watch(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Provider], list[int]]]:
    monkeypatch.setattr("workers.spot_notices._LOOK_SECONDS", 0.01)
    made: list[SpotNotices] = []

    def start(provider: Provider) -> list[int]:
        notices: list[int] = []
        made.append(SpotNotices(provider, lambda: notices.append(1), metadata.address))
        made[-1].start()
        return notices

    yield start
    for each in made:
        each.end()


@Cases
def test_a_notice_stops_the_worker_once(
    metadata: Metadata,
    watch: Callable[[Provider], list[int]],
    provider: Provider,
    path: str,
    quiet: tuple[int, str],
    notice: str,
) -> None:
    metadata.answers[path] = quiet
    notices = watch(provider)
    until(lambda: len(metadata.asked) > 8, 10)
    assert notices == []
    metadata.answers[path] = (200, notice)
    until(lambda: notices == [1], 10)
    count = len(metadata.asked)
    threading.Event().wait(0.1)
    assert (notices, len(metadata.asked)) == ([1], count), "it looks no more"


@Cases
def test_a_notice_is_seen_before_anything_begins(
    metadata: Metadata,
    watch: Callable[[Provider], list[int]],
    provider: Provider,
    path: str,
    quiet: tuple[int, str],
    notice: str,
) -> None:
    metadata.answers[path] = (200, notice)
    assert watch(provider) == [1]


@pytest.mark.parametrize("answer", [(500, "no"), (200, "<html>"), (200, "[]"), (200, '{"Events": null}')])
@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_a_strange_answer_is_no_notice(
    metadata: Metadata, watch: Callable[[Provider], list[int]], provider: Provider, answer: tuple[int, str]
) -> None:
    metadata.answers |= dict.fromkeys((AWS, GCP, AZURE), answer)
    assert watch(provider) == []


def test_a_machine_without_a_metadata_service_goes_on() -> None:
    notices: list[int] = []
    made = SpotNotices("gcp", lambda: notices.append(1), "http://127.0.0.1:9")
    made.start()
    made.end()
    assert notices == []


def test_aws_is_asked_with_a_token(metadata: Metadata, watch: Callable[[Provider], list[int]]) -> None:
    metadata.answers |= {"/latest/api/token": (200, "T0"), AWS: (404, "")}
    watch("aws")
    until(lambda: len(metadata.asked) >= 2, 10)
    (method, path, sent), (_, asked, headers) = metadata.asked[:2]
    assert (method, path, sent["X-aws-ec2-metadata-token-ttl-seconds"]) == ("PUT", "/latest/api/token", "60")
    assert (asked, headers["X-aws-ec2-metadata-token"]) == (AWS, "T0")
