"""A hub on loopback: as much of its interface as finding and downloading a model or a dataset takes."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT, OLDER_COMMIT = "a" * 40, "b" * 40
_REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER_COMMIT, OLDER_COMMIT: OLDER_COMMIT}


class Hub(ThreadingHTTPServer):
    """Has the model me/tiny and the dataset me/sums, with the revisions main and v1, and the same files.

    Args:
        folder: the model's files, the same in both revisions.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.token: str | None = None
        """Required, if set."""
        self.is_gated = False
        self.breaks_after: int | None = None
        """The first download of each file ends after this many bytes; None: none does."""
        self.stays_broken = False
        """Every download ends early."""
        self.downloaded_with: set[str | None] = set()
        self.downloaded: set[str] = set()
        """The commits whose files were asked for."""
        self.continued_from: list[int] = []
        self.broken: set[str] = set()
        self.tag: str | None = None
        """Every file's entity tag; None: its digest."""
        self.commit: str | None = None
        """The commit that descriptions of repositories name; None: the true one."""
        self.redirects: dict[str, str] = {}
        """Where requests for some files are sent on to."""
        self.described: bytes | None = None
        """What it sends instead of the list of files."""
        self.missing_from: str | None = None
        """If set, every file is reported as missing from this commit."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        sent = self.headers.get("Authorization")
        parts = re.sub(r"^(/api)?/(models|datasets)(?=/)|^/api/models", "", path).strip("/").split("/")
        revision = parts[3] if len(parts) > 3 else "main"
        if hub.token is not None and sent != f"Bearer {hub.token}":
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"} if sent is None else {}, with_body)
        elif parts[:2] not in (["me", "tiny"], ["me", "sums"]):
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif hub.is_gated and ("resolve" in parts or parts[1] == "sums"):
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        elif revision not in _REVISIONS:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif (location := self.server.redirects.get("/".join(parts[4:]))) is not None:
            content = hub.files["/".join(parts[4:])]
            headers = {
                "Location": location, "X-Repo-Commit": _REVISIONS[revision], "ETag": f'"{_digest(content)}"',
                "X-Linked-Size": str(len(content)),
            }  # fmt: skip
            self._send(302, b"", headers, with_body)
        elif path.startswith("/api/") and "tree" in parts and hub.described is not None:
            self._send(200, hub.described, {}, with_body)
        elif path.startswith("/api/"):
            self._send(200, self._described(parts, _REVISIONS[revision]), {}, with_body)
        elif hub.missing_from is not None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.missing_from}
            self._send(404, b"", headers, with_body)
        elif (content := hub.files.get("/".join(parts[4:]))) is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        else:
            hub.downloaded_with.add(sent)
            hub.downloaded.add(_REVISIONS[revision])
            self._send_file("/".join(parts[4:]), content, _REVISIONS[revision], with_body)

    def _described(self, parts: list[str], commit: str) -> bytes:
        files = self.server.files
        if "tree" in parts:
            listed: Any = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            named = self.server.commit or commit
            listed = {"id": "/".join(parts[:2]), "sha": named, "siblings": siblings}
        return json.dumps(listed).encode()

    def _send_file(self, name: str, content: bytes, commit: str, with_body: bool) -> None:
        hub, start, status = self.server, 0, 200
        headers = {
            "ETag": f'"{hub.tag or _digest(content)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        if wanted is not None and with_body:
            start, status = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            hub.continued_from.append(start)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        breaks = hub.breaks_after is not None and len(content) > start + hub.breaks_after
        if with_body and breaks and (hub.stays_broken or name not in hub.broken):
            hub.broken.add(name)
            assert hub.breaks_after is not None
            self._send(status, content[start:], headers, with_body, hub.breaks_after)
        else:
            self._send(status, content[start:], headers, with_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool, most: int | None = None
    ) -> None:
        """Sends an answer, or only its first `most` bytes."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[:most])
        self.close_connection = self.close_connection or most is not None


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # as git does


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def use(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub in this process use the hub, without a token, and with a cache in the folder."""
    constants = {
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "no-token"),
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
