"""A hub, or a mirror of it, that sends what no hub should: found by the nineteenth attack."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.contract import public_addresses
from app.datasets import content, hub_datasets
from app.datasets.file_types import ReadOptions
from app.errors import TooManyRequests, Unprocessable
from app.hub import client
from app.models import hub as models
from app.security.authentication import CALLER_KEY
from app.settings import Settings

pytestmark = pytest.mark.sqlite

COMMIT = "c" * 40
LINE = b'{"text": "abc"}\n'
Reply = tuple[int, dict[str, str], bytes]


class HostileHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.listing: Any = {"sha": COMMIT, "siblings": [{"rfilename": "train.jsonl", "size": len(LINE)}]}
        self.file: Reply = (200, {}, LINE)
        self.delay = 0.0
        self.tokens: list[tuple[str, str | None]] = []
        """Each path that was asked for, and the token that came with it."""
        self.hosts: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HostileHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.tokens.append((self.path, self.headers.get("Authorization")))
        self.server.hosts.append(self.headers.get("Host"))
        time.sleep(self.server.delay)
        listing = self.server.listing
        listed = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
        status, headers, body = (200, {}, listed) if self.path.startswith("/api/") else self.server.file
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileHub]:
    hub = HostileHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def online(settings: Settings) -> Settings:
    settings.make_directories()
    return settings.model_copy(update={"offline": False})


def find(online: Settings) -> content.DataFiles:
    return hub_datasets.find("me/sums", ReadOptions(), online)


def refusal(online: Settings) -> str:
    with pytest.raises(Unprocessable) as caught:
        find(online)
    assert not list(online.files_dir.iterdir())
    return caught.value.message


def test_files_are_deleted_once_they_are_no_longer_used(hub: HostileHub, online: Settings) -> None:
    found = find(online)
    assert found.sources[0][0].read_bytes() == LINE
    del found
    assert not list(online.files_dir.iterdir())


@pytest.mark.parametrize("tag", ["../../../../tmp/x", "/tmp/x", 'W/"../x"', "", "..", "\u00e9"])
def test_headers_do_not_become_paths(hub: HostileHub, online: Settings, tag: str, tmp_path: Path) -> None:
    hub.file = (200, {"ETag": tag.encode("latin-1").decode("latin-1"), "X-Repo-Commit": f"../{tag}"}, LINE)
    (path, name), *more = find(online).sources
    assert (path.parent.parent, name, more) == (online.files_dir, "train.jsonl", [])


@pytest.mark.parametrize(
    "listing",
    [
        b"", b"[]", b"null", b"7", b"not JSON", b"\xff", b"[" * 100_000, {}, {"sha": "main"}, {"sha": 7},
        {"sha": f"../{COMMIT}"}, {"sha": COMMIT, "siblings": [None]}, {"sha": COMMIT, "siblings": "a"},
        {"sha": COMMIT, "siblings": [{"size": 1}]},
        *({"sha": COMMIT, "siblings": [{"rfilename": name}]} for name in (
            "../train.jsonl", "/etc/train.jsonl", "a/../train.jsonl", "a\0.jsonl", "\ud800.jsonl", 7, None,
        )),
        *({"sha": COMMIT, "siblings": [{"rfilename": "train.jsonl", "size": size}]} for size in ("x", [1])),
        b'{"sha": "%b", "siblings": [{"rfilename": "t.jsonl", "size": %b}]}' % (COMMIT.encode(), b"9" * 5000),
    ],
)  # fmt: skip
def test_a_listing_that_is_none_is_refused(hub: HostileHub, online: Settings, listing: Any) -> None:
    hub.listing = listing
    assert "cannot be read" in refusal(online)


def test_an_endless_listing_is_refused(hub: HostileHub, online: Settings) -> None:
    hub.listing = b" " * (9 * 2**20)
    assert "cannot be read" in refusal(online)


@pytest.mark.parametrize("size", [1, 0, -5, None])
def test_a_file_is_not_larger_than_the_limit_whatever_its_listed_size(
    hub: HostileHub, online: Settings, size: int | None
) -> None:
    hub.listing = {"sha": COMMIT, "siblings": [{"rfilename": "train.jsonl", "size": size}]}
    hub.file = (200, {}, LINE * 1000)
    assert "more than 1000 bytes" in refusal(online.model_copy(update={"max_file_bytes": 1000}))


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:9/secret",
        "http://10.0.0.1/",
        "file:///etc/passwd",
        "http://127.0.0.1:99999/",
        "ftp://a",
    ],
)
def test_redirects_lead_to_the_public_internet_alone(
    hub: HostileHub, online: Settings, location: str
) -> None:
    hub.file = (302, {"Location": location}, b"")
    assert "the hub" in refusal(online)
    with pytest.raises(models.NotOnHub):
        models.fetch("me/tiny", online)


def test_the_token_goes_to_the_hub_alone(
    hub: HostileHub, online: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = HostileHub()
    threading.Thread(target=other.serve_forever, daemon=True).start()
    monkeypatch.setattr(client, "_address_of_redirect", lambda url, hub: None)
    hub.file = (302, {"Location": f"{other.url}/file"}, b"")
    find(online)
    assert [token for _, token in other.tokens] == [None]
    assert {token for _, token in hub.tokens} == {"Bearer hf_secret"}
    other.shutdown()
    other.server_close()


def test_a_redirect_is_followed_to_the_address_that_was_checked(
    hub: HostileHub, online: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = HostileHub()
    threading.Thread(target=other.serve_forever, daemon=True).start()
    monkeypatch.setattr(public_addresses, "resolve_host", lambda host, port: "127.0.0.1")
    hub.file = (302, {"Location": f"http://files.invalid:{other.server_port}/file"}, b"")
    other.file = (200, {}, LINE * 2)
    found = find(online)
    assert found.sources[0][0].read_bytes() == LINE * 2
    assert other.hosts == [f"files.invalid:{other.server_port}"]
    other.shutdown()
    other.server_close()


def test_a_slow_download_is_given_up(
    hub: HostileHub, online: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(client, "_LEAST_BYTES_PER_SECOND", 10**9)
    assert "answers too slowly" in refusal(online)


def test_one_key_s_look_ups_leave_places_to_others(hub: HostileHub, online: Settings) -> None:
    hub.delay, hub.file = 0.3, (200, {"X-Repo-Commit": COMMIT}, b"{}")
    refused = []

    def many() -> None:
        CALLER_KEY.set("key-1")
        try:
            models.fetch("me/tiny", online)
        except TooManyRequests:
            refused.append(1)

    threads = [threading.Thread(target=many) for _ in range(24)]
    for thread in threads:
        thread.start()
    CALLER_KEY.set("key-2")
    assert models.fetch("me/other", online).commit == COMMIT
    for thread in threads:
        thread.join()
    assert len(refused) >= 20


def test_a_proxy_for_other_addresses_does_not_open_redirects(
    hub: HostileHub, online: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NO_PROXY", "FTP_PROXY", "MY_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    hub.file = (302, {"Location": "http://127.0.0.1:9/secret"}, b"")
    assert "not on the public internet" in refusal(online)
