"""A separate process downloads a hub model with the token; the trainer cannot use the token or write to the
hub's cache.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from workers.run_directory import HIDDEN_VARIABLE, TOKEN_VARIABLE, RunDirectory
from workers.training.isolation import named_view
from workers.training.tiny_gpt2 import ensure_tiny_gpt2

ROOT = Path(__file__).parents[2]


class Hub(ThreadingHTTPServer):
    """As much of the hub's interface as a download takes, for one model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.downloaded_with: set[str | None] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        path, headers, status = self.path.partition("?")[0], {}, 200
        files = self.server.files
        if "/tree/" in path:
            body = json.dumps([
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in files.items()
            ]).encode()  # fmt: skip
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "me/tiny", "sha": "a" * 40, "siblings": siblings}).encode()
        elif (content := files.get(path.rpartition("/")[2])) is not None:
            self.server.downloaded_with.add(self.headers.get("Authorization"))
            body, headers = content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": "a" * 40}
        else:
            body, status = b"", 404
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        return body


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # as git does


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    ensure_tiny_gpt2(tmp_path / "source")
    hub = Hub(tmp_path / "source")
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


def laid(data: Path) -> RunDirectory:
    """A run of a model of the hub."""
    spec = make_spec(data=small_data(), max_steps=2)
    model = spec.model.model_copy(update={"name": "me/tiny", "source": "hub", "fingerprint": None})
    (data / "runs").mkdir(parents=True)
    run = create_run(data / "runs" / "ftjob-1", spec.model_copy(update={"model": model}))
    run.write_assignment(run.assignment().model_copy(update={"model_path": "me/tiny"}))
    return run


def trained(run: RunDirectory, hub_url: str, home: Path) -> subprocess.CompletedProcess[str]:
    """An isolated trainer's run to its end, with a token of the hub's."""
    reading, writing = os.pipe()
    os.write(writing, b"hf_secret")
    os.close(writing)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), TOKEN_VARIABLE: str(reading),
            HIDDEN_VARIABLE: named_view(run.path.parent.parent, run.assignment())}  # fmt: skip
    command = [sys.executable, "-m", "workers.training", str(run.path)]
    try:
        return subprocess.run(
            command, env=env, cwd=ROOT, pass_fds=[reading], capture_output=True, text=True, check=False
        )
    finally:
        os.close(reading)


def test_a_model_of_the_hub_is_downloaded_with_the_token_and_trained_without(
    tmp_path: Path, hub: Hub
) -> None:
    run = laid(tmp_path / "data")
    done = trained(run, f"http://127.0.0.1:{hub.server_port}", tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    assert hub.downloaded_with == {"Bearer hf_secret"}
    assert run.outcome() is not None
    assert "hf_secret" not in done.stdout + done.stderr


def test_an_unreachable_hub_is_reported_before_training(tmp_path: Path) -> None:
    run = laid(tmp_path / "data")
    assert trained(run, "http://127.0.0.1:9", tmp_path / "hub").returncode == 1
    failure = run.failure()
    assert failure is not None
    assert failure.code == "model_not_loaded"
    assert "me/tiny" in failure.message
