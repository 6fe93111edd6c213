"""`accrue import openai` against a server that answers as OpenAI's does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.service import Accrue, running

pytestmark = pytest.mark.thorough

LINES = "".join(
    json.dumps(
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    )
    + "\n"
    for n in range(20)
)


def job(number: int, kind: str = "supervised", **changes: Any) -> dict[str, Any]:
    """A job as GET /v1/fine_tuning/jobs of OpenAI's API reference shows it."""
    hyperparameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 2.0}
    return {
        "object": "fine_tuning.job", "id": f"ftjob-{number}", "model": "gpt-4o-mini-2024-07-18",
        "created_at": 1721764800 - number, "finished_at": None, "estimated_finish": None, "error": None,
        "fine_tuned_model": f"ft:gpt-4o-mini-2024-07-18:org:sums-{number}:abc", "organization_id": "org-1",
        "result_files": [], "status": "succeeded", "validation_file": None, "training_file": "file-train",
        "hyperparameters": hyperparameters, "trained_tokens": 100, "integrations": [], "seed": 7,
        "method": {"type": kind, kind: {"hyperparameters": hyperparameters}},
        "metadata": {"team": "a"}, **changes,
    }  # fmt: skip


JOBS = [
    job(1),
    job(2, "reinforcement"),
    job(3, validation_file="file-valid", metadata=None, fine_tuned_model=None),
    job(4, training_file="file-gone"),
    job(5, method={"type": "supervised", "supervised": {"hyperparameters": {
        "n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto",
    }}}),
    job(6, metadata={str(n): "x" for n in range(16)}, user_provided_suffix="support bot!",
        fine_tuned_model=None),
]  # fmt: skip
FILES = {"file-train": "sums.jsonl", "file-valid": "valid"}


class OpenAI(BaseHTTPRequestHandler):
    """The routes that the import calls."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/v1")
        name = path.split("/")[2] if path.startswith("/files/") else ""
        if self.headers["Authorization"] != "Bearer sk-test":
            self.answer({"error": {"message": "Incorrect API key provided.", "type": "x"}}, 401)
        elif path == "/fine_tuning/jobs":
            self.answer({"object": "list", "data": JOBS, "has_more": False})
        elif path.startswith("/fine_tuning/jobs/"):
            self.answer(next(each for each in JOBS if each["id"] == path.rpartition("/")[2]))
        elif name not in FILES:
            self.answer({"error": {"message": f"No such File object: {name}", "type": "x"}}, 404)
        elif path.endswith("/content"):
            self.answer(LINES.encode())
        else:
            self.answer(
                {"id": name, "object": "file", "bytes": len(LINES), "created_at": 1, "filename": FILES[name],
                 "purpose": "fine-tune", "status": "processed"}
            )  # fmt: skip

    def answer(self, body: Any, status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


@contextmanager
def openai() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    with openai() as url, running(tmp_path_factory.mktemp("accrue")) as accrue:
        accrue.env |= {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": url, "OPENAI_MAX_RETRIES": "0"}
        accrue.serve()
        yield accrue


def imported(accrue: Accrue, *words: str, status: int = 1) -> list[dict[str, Any]]:
    done = accrue.command("import", "openai", *words, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_jobs_come_with_their_files_and_hyperparameters(accrue: Accrue, tmp_path: Path) -> None:
    planned = imported(accrue, "--dry-run")
    assert [each["state"] for each in planned] == [
        "would be imported", "not supported", "would be imported", "would be imported", "would be imported",
        "would be imported",
    ]  # fmt: skip
    assert accrue.get("/v1/files")["data"] == []

    found = imported(accrue, "--paused")
    assert [each["state"] for each in found] == [
        "imported", "not supported", "imported", "not imported", "imported", "imported",
    ]  # fmt: skip
    assert "reinforcement: only supervised and dpo jobs" in found[1]["error"]
    assert "file-gone cannot be downloaded" in found[3]["error"]
    first, third, fifth = (accrue.get(f"/v1/fine_tuning/jobs/{found[n]['training_id']}") for n in (0, 2, 4))
    assert first["hyperparameters"] == {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 2.0}
    assert (first["model"], first["seed"]) == ("accrue/tiny-gpt2", 7)
    assert first["metadata"] == {"team": "a", "imported_from": "ftjob-1"}
    assert first["status"] == "paused"
    assert third["validation_file"] is not None
    assert fifth["hyperparameters"]["n_epochs"] >= 1
    files = {file["id"]: file["filename"] for file in accrue.get("/v1/files")["data"]}
    assert sorted(files.values()) == ["sums.jsonl", "valid.jsonl"]
    assert files[first["training_file"]] == "sums.jsonl"
    assert files[third["validation_file"]] == "valid.jsonl"
    assert first["training_file"] == fifth["training_file"]

    sixth = accrue.get(f"/v1/fine_tuning/jobs/{found[5]['training_id']}")
    assert len(sixth["metadata"]) == 16
    assert sixth["metadata"]["imported_from"] == "ftjob-6"

    again = imported(accrue)
    assert [each["state"] for each in again[:1] + again[2:3]] == ["imported before"] * 2
    assert again[0]["training_id"] == found[0]["training_id"]
    assert len(accrue.get("/v1/fine_tuning/jobs")["data"]) == 4


def test_a_refused_job_leaves_no_file_and_those_imported_before_do_not_count(tmp_path: Path) -> None:
    with openai() as url, running(tmp_path) as accrue:
        accrue.env |= {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": url, "OPENAI_MAX_RETRIES": "0"}
        accrue.serve()
        [refused] = imported(accrue, "--job", "ftjob-1", "--model", "nobody/nothing")
        assert refused["state"] == "not imported"
        assert accrue.get("/v1/files")["data"] == []
        first = imported(accrue, "--limit", "1", status=0)
        second = imported(accrue, "--limit", "2")
        assert [each["openai"] for each in first] == ["ftjob-1"]
        assert [each["state"] for each in second] == ["imported before", "not supported", "imported"]


def test_one_job_is_imported_by_its_id(accrue: Accrue) -> None:
    [one] = imported(accrue, "--job", "ftjob-2")
    assert (one["openai"], one["state"]) == ("ftjob-2", "not supported")
    told = accrue.command("import", "openai", "--job", "ftjob-2").stdout
    assert "ftjob-2: its method is reinforcement" in told


def test_problems_with_the_account_are_one_line(accrue: Accrue) -> None:
    before = dict(accrue.env)
    for changes, told in (
        ({"OPENAI_API_KEY": "wrong"}, "Incorrect API key"),
        ({"OPENAI_API_KEY": ""}, "OpenAI"),
        ({"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}, "Connection error"),
    ):
        accrue.env.clear()
        accrue.env.update({**before, **changes})
        done = accrue.command("import", "openai")
        assert done.returncode == 1
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    accrue.env.clear()
    accrue.env.update(before)
