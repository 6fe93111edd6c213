"""A hub on loopback that takes uploads: as much of its interface as `HfApi.upload_folder` needs."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ReceivingHub(ThreadingHTTPServer):
    """Takes every file of a commit as base64, as the hub does with small ones."""

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.repositories: dict[str, Any] = {}
        """What each repository was created with, by its name."""
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ReceivingHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub, path = self.server, self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            hub.repositories[name] = asked
            self._send(200, {"url": f"{hub.url}/{name}", "id": name})
        elif "/preupload/" in path:
            named = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named]
            self._send(200, {"files": modes})
        elif "/commit/" in path:
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    hub.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            url = f"{hub.url}{path.removeprefix('/api/models').partition('/commit/')[0]}/commit/1"
            self._send(200, {"commitUrl": url, "commitOid": "a" * 40, "success": True})
        else:
            self._send(404, {"error": path})

    def do_GET(self) -> None:
        self._send(404, {"error": self.path})

    def _send(self, status: int, content: Any) -> None:
        sent = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(sent)


@contextmanager
def receiving_hub(token: str) -> Iterator[ReceivingHub]:
    """A hub that takes uploads with this token, while the block runs."""
    hub = ReceivingHub(token)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
