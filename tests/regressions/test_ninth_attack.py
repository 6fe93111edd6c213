"""Regression tests for the ninth attack: slow transfers, negligible weights, damaged files, odd numbers."""

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from safetensors import SafetensorError
from sqlalchemy import select

from app.contract.data_formats import BadLine, parse_line
from app.datasets import files
from app.settings import Settings
from app.statistics import performance
from app.storage.database import Database
from app.storage.tables import Job, Key, StepMetric
from app.web import connections
from app.web.body_limits import MAX_UPLOADS_PER_KEY
from app.web.downloads import MAX_PER_KEY
from tests.harness.log_lines import line
from tests.harness.requests import JOB, PATH, key_for, service
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted
from tests.harness.training import run_to_end, scale_losses
from workers.training.exceptions import CannotTrain
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

FILES = "/v1/files"


def upload(client: TestClient, header: dict[str, str], text: str = "abc") -> str:
    content = json.dumps({"text": text}).encode()
    answer = client.post(FILES, headers=header, files={"file": ("data.jsonl", content)})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def scope_of(app: Any, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """The ASGI scope of a request from this machine."""
    named = {"host": "127.0.0.1", **headers}
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "app": app,
    }  # fmt: skip


async def send_slowly(app: Any, header: dict[str, str], path: str = FILES) -> asyncio.Task[None]:
    """Starts an upload whose body never ends, and returns once the service waits for more of it."""
    waiting = asyncio.Event()
    parts = [{"type": "http.request", "body": b"--x\r\n", "more_body": True}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        waiting.set()
        return await asyncio.Event().wait()

    form = {"content-type": "multipart/form-data; boundary=x", **header}

    async def send(message: Any) -> None:
        pass

    task = asyncio.create_task(app(scope_of(app, "POST", path, form), receive, send))
    await asyncio.wait_for(waiting.wait(), 30)
    return task


def test_slow_uploads_of_one_key_do_not_stop_others(settings: Settings) -> None:
    with service(settings) as (client, slow):
        app: Any = client.app
        other = key_for(app.state.database)

        async def flood() -> tuple[int, int]:
            tasks = [await send_slowly(app, slow) for _ in range(MAX_UPLOADS_PER_KEY)]
            refused = await asyncio.to_thread(
                client.post, FILES, headers=slow, files={"file": ("data.jsonl", b'{"text": "abc"}')}
            )
            accepted = await asyncio.to_thread(upload, client, other)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert refused.headers["retry-after"]
            assert accepted
            return refused.status_code, len(tasks)

        assert asyncio.run(flood()) == (429, MAX_UPLOADS_PER_KEY)
        assert upload(client, slow)


def test_slow_downloads_of_a_file_are_limited_per_key(settings: Settings) -> None:
    with service(settings) as (client, slow):
        app: Any = client.app
        with app.state.database.reading() as session:
            key_id = session.scalar(select(Key.id))
        other = key_for(app.state.database)
        mine, theirs = upload(client, slow), upload(client, other, "another")
        path = settings.files_dir / mine
        held = [app.state.downloads._limit.acquire(key_id) for _ in range(MAX_PER_KEY)]
        refused = client.get(f"{FILES}/{mine}/content", headers=slow)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert client.get(f"{FILES}/{theirs}/content", headers=other).status_code == 200
        for end in held:
            end()
        part = client.get(f"{FILES}/{mine}/content", headers={**slow, "Range": "bytes=2-5"})
        assert (part.status_code, part.content) == (206, path.read_bytes()[2:6])
        assert not app.state.downloads._limit._open


def bodies(client: TestClient, path: str) -> tuple[list[int], list[bool]]:
    """The sizes of the parts in which a response is sent, and whether each says that more follow."""
    app: Any = client.app
    sizes, more = [], []

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sizes.append(len(message.get("body", b"")))
            more.append(message.get("more_body", False))

    asyncio.run(app(scope_of(app, "GET", path, {}), receive, send))
    return sizes, more


def test_large_responses_are_sent_in_parts(client: TestClient) -> None:
    sizes, more = bodies(client, "/dashboard/plotly.js")
    assert sum(sizes) == len(client.get("/dashboard/plotly.js").content) > 1_000_000
    assert max(sizes) <= 2**15
    assert more == [True] * (len(sizes) - 1) + [False]


@pytest.mark.parametrize("path", ["/", "/dashboard/main.js", "/docs/static/swagger-ui.css"])
def test_pages_are_sent_from_memory(client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client.get(path)
    assert first.status_code == 200

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("anyio.open_file", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    again = client.get(path)
    assert again.content == first.content
    if path != "/":
        unchanged = client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_running_out_of_descriptors_gets_503(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(files, "get", refuse)
    answer = client.get(f"{FILES}/file-1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize(("soft", "hard"), [(1024, 4096), (1024, 2**20), (2**20, 2**20), (256, 256)])
def test_connections_leave_descriptors_for_files(
    soft: int, hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [soft, hard]

    def set_limits(_: int, new: tuple[int, int]) -> None:
        limits[:] = new

    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(connections.resource, "setrlimit", set_limits)
    allowed = connections.raise_connection_limit()
    assert allowed + min(connections._OTHER_FILES, limits[0] // 2) <= limits[0]
    assert allowed >= min(connections.MAX_CONNECTIONS, limits[0] // 2)


@pytest.mark.parametrize("weight", [1e-300, 1e-40, 9e-7])
def test_negligible_weights_are_rejected(weight: float) -> None:
    with pytest.raises(BadLine, match="at least 1e-06"):
        parse_line(json.dumps({"text": "abc", "weight": weight}).encode())
    parse_line(json.dumps({"text": "abc", "weight": 0}).encode())
    parse_line(json.dumps({"text": "abc", "weight": 1e-6}).encode())


def test_a_run_without_any_step_saves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_losses(monkeypatch, lambda batch: float("nan"))
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=None, epochs=1))
    with pytest.raises(CannotTrain, match="the model is untrained") as caught:
        run_to_end(run)
    assert caught.value.code == "nothing_to_learn"
    assert not run.model.exists()


def test_a_clipping_threshold_beyond_fp32_is_rejected(client: TestClient) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "gradient_clipping": 1e308})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "gradient_clipping")


def damaged_headers() -> Iterator[bytes]:
    yield (2**63).to_bytes(8, "little")
    yield b""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]}}).encode()
    yield len(header).to_bytes(8, "little") + header
    yield b"\x80\x04N."  # a pickle


@pytest.mark.parametrize("content", list(damaged_headers()))
def test_damaged_weights_fail_the_job_with_the_reason(tmp_path: Path, content: bytes) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=1))
    ensure_tiny_gpt2(tmp_path / "tiny-gpt2")
    with pytest.raises((SafetensorError, OSError, ValueError)):
        _open(content, tmp_path / "damaged.safetensors")
    (tmp_path / "tiny-gpt2" / "model.safetensors").write_bytes(content)
    with pytest.raises(CannotTrain, match="tiny-gpt2") as caught:
        run_to_end(run)
    assert caught.value.code == "model_not_loaded"


def _open(content: bytes, path: Path) -> None:
    from safetensors import safe_open

    path.write_bytes(content)
    with safe_open(path, "pt") as opened:
        opened.keys()


def test_tiny_losses_are_averaged(database: Database) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        for step, loss in enumerate((1e-320, 1e-200, 0.5), 1):
            session.add(StepMetric(job_id=job_id, **line(step, loss=loss).model_dump()))
    with database.reading() as session:
        figures = performance.of_job(session, session.get_one(Job, job_id))
    assert figures.stats.loss_variance == pytest.approx(0.25 / 3 - (0.5 / 3) ** 2)


@pytest.mark.parametrize(
    "host",
    ["[::1]evil", "localhost#evil", "localhost/evil", "localhost?x", "localhost:abc", "127.0.0.1:", "@"],
)
def test_malformed_host_headers_are_rejected(client: TestClient, host: str) -> None:
    assert client.get(PATH, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:65535", "[::1]:8000", "[::1]"])
def test_hosts_of_this_machine_are_accepted(client: TestClient, host: str) -> None:
    assert client.get(PATH, headers={"Host": host}).status_code == 200
