"""Limits per key, the audit log, and the headers of every answer."""

import asyncio
import errno
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.errors import BadSetting, TooManyRequests
from app.jobs import routes as job_routes
from app.security.rates import RateLimiter
from app.settings import Settings, get_settings
from app.storage.tables import Job
from app.web.concurrency import SlowWork
from app.web.middleware import _address
from tests.harness.requests import JOB, PATH, key_for, service
from tests.harness.runs import until

AUDIT = "/gradient-accumulation/audit"


def test_a_rate_limited_request_gets_retry_after(settings: Settings) -> None:
    with service(settings, rate_limit="5/minute") as (client, mine):
        assert [client.get(PATH, headers=mine).status_code for _ in range(5)] == [200] * 5
        refused = client.get(PATH, headers=mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        another = key_for(client.app.state.database)  # type: ignore[attr-defined]
        assert client.get(PATH, headers=another).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCRUE_RATE_LIMIT", "often"),
        ("ACCRUE_RATE_LIMIT", "0/minute"),
        ("ACCRUE_RATE_LIMIT_STORAGE", "carrier-pigeon://"),
        ("ACCRUE_RATE_LIMIT_STORAGE", "redis://localhost"),  # without its client
    ],
)
def test_an_invalid_rate_limit_prevents_startup(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("app.settings.find_spec", lambda _: None)
    get_settings.cache_clear()
    with pytest.raises(BadSetting, match=name):
        get_settings()
    get_settings.cache_clear()


@pytest.mark.parametrize("limit", ["1/second", "6000/minute", "10/hour", "100000/day"])
def test_every_rate_limit_accepted_by_settings_works(limit: str) -> None:
    asyncio.run(RateLimiter(Settings(rate_limit=limit).rate_limit, "memory://").count("key-1"))


def test_a_storage_that_does_not_answer_is_reported_at_the_start_and_blocks_nobody() -> None:
    limiter = RateLimiter("1/minute", f"redis://127.0.0.1:{free_port()}")

    async def start_and_count() -> None:
        await limiter.check()
        for _ in range(3):
            await limiter.count("key-1")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(start_and_count())
    (entry,) = logs  # not once for each request
    assert entry["log_level"] == "error"
    assert "connect" in entry["error"].lower()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of connections left open
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_two_services_share_one_count(tmp_path: Path) -> None:
    port = free_port()
    server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", tmp_path])
    try:
        until(lambda: is_listening(port))

        async def refused_after() -> int:
            both = [RateLimiter("5/minute", f"redis://127.0.0.1:{port}") for _ in range(2)]
            for number in range(20):
                try:
                    await both[number % 2].count("key-1")
                except TooManyRequests:
                    return number
            return 20

        assert asyncio.run(refused_after()) == 5
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def test_queued_jobs_per_key_are_limited(settings: Settings) -> None:
    submit = f"{PATH}/with-accumulation"
    with service(settings, max_queued_jobs=2) as (client, mine):
        first, _ = (client.post(submit, json=JOB, headers=mine).json()["id"] for _ in range(2))
        refused = client.post(submit, json=JOB, headers=mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert refused.headers["x-should-retry"] == "false"
        another = key_for(client.app.state.database)  # type: ignore[attr-defined]
        assert client.post(submit, json=JOB, headers=another).status_code == 202
        admin = key_for(client.app.state.database, "admin")  # type: ignore[attr-defined]
        assert client.post(submit, json=JOB, headers=admin).status_code == 202  # others' do not count
        client.post(f"{PATH}/{first}/cancel", headers=mine)
        assert client.post(submit, json=JOB, headers=mine).status_code == 202
        assert len(list(settings.files_dir.iterdir())) == 5  # nothing is left of what was refused


def entries(client: TestClient, header: dict[str, str], **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(AUDIT, headers=header, params=query).json()["data"]
    return found


def test_changes_are_written_to_the_audit_log(settings: Settings) -> None:
    with service(settings) as (client, mine):
        admin = key_for(client.app.state.database, "admin")  # type: ignore[attr-defined]
        made = client.post(f"{PATH}/with-accumulation", json=JOB, headers=mine)
        client.get(PATH, headers=mine)
        client.delete(f"{PATH}/{made.json()['id']}", headers=mine)
        client.post(f"{PATH}/with-accumulation", json=JOB)  # without a key
        until(lambda: len(entries(client, admin)) == 3, 10)
        nobody, deleted, submitted = entries(client, admin)
        assert (submitted["method"], submitted["status"]) == ("POST", 202)
        assert submitted["request_id"] == made.headers["x-request-id"]
        assert submitted["address"] == "testclient"
        assert (deleted["method"], deleted["status"]) == ("DELETE", 409)
        assert deleted["path"].endswith(made.json()["id"])
        assert (nobody["status"], nobody["key_id"]) == (401, None)
        assert entries(client, admin, key_id=submitted["key_id"]) == [deleted, submitted]
        assert client.get(AUDIT, headers=mine).status_code == 403


def test_reads_are_audited_if_enabled(settings: Settings) -> None:
    with service(settings, audit_reads=True) as (client, mine):
        client.get(PATH, headers=mine)
        admin = key_for(client.app.state.database, "admin")  # type: ignore[attr-defined]
        until(lambda: any(entry["path"] == PATH for entry in entries(client, admin)), 10)


def test_pending_audit_entries_are_written_at_shutdown(settings: Settings) -> None:
    with service(settings) as (client, mine):
        client.post(f"{PATH}/ftjob-1/cancel", headers=mine)
    with service(settings) as (client, _):
        admin = key_for(client.app.state.database, "admin")  # type: ignore[attr-defined]
        (entry,) = entries(client, admin)
        assert (entry["path"], entry["status"]) == (f"{PATH}/ftjob-1/cancel", 404)


def test_every_response_has_security_headers(client: TestClient) -> None:
    for path in (PATH, "/healthz", "/nowhere"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["x-frame-options"] == "DENY"


def test_only_allowed_origins_may_send_requests(settings: Settings) -> None:
    ours, other = {"Origin": "https://ours.example"}, {"Origin": "https://other.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with service(settings, cors_origins="https://ours.example/, https://too.example") as (client, mine):
        preflight = client.options(PATH, headers={**ours, **asks})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ours.example"
        assert client.options(PATH, headers={**other, **asks}).status_code == 400
        answer = client.get(PATH, headers={**ours, **mine})
        assert answer.headers["access-control-allow-origin"] == "https://ours.example"
        assert "access-control-allow-origin" not in client.get(PATH, headers={**other, **mine}).headers
        assert client.get("/healthz", headers=other).status_code == 403
        assert client.get("/healthz", headers=ours).status_code == 200


@pytest.mark.parametrize(
    ("host", "kept"),
    [("203.0.113.7", "203.0.113.7"), ("2001:db8::1", "2001:db8::1"), ("fe80::1%eth0", "fe80::1%eth0"),
     ("<script>", "?"), ("9" * 8000, "?"), ("", "?")],
)  # fmt: skip
def test_client_addresses_are_validated_before_they_are_stored(host: str, kept: str) -> None:
    assert _address(host) == kept


def counted_runs(work: SlowWork, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The keys of the requests that run in these threads from now on."""
    keys: list[str | None] = []
    honest = work.run

    async def run(key_id: str | None, work: Callable[[], Any]) -> Any:
        keys.append(key_id)
        return await honest(key_id, work)

    monkeypatch.setattr(work, "run", run)
    return keys


@pytest.mark.parametrize(
    "path",
    [
        "/gradient-accumulation/performance/metrics",
        "/gradient-accumulation/performance/recommendations?training_id={job}",
        "/gradient-accumulation/performance/recommendations",
        "/gradient-accumulation/stats/compare?ids={job}&ids={job}",
        "/gradient-accumulation/stats",
        "/gradient-accumulation/stats/{job}",
        "/gradient-accumulation/training/{job}/metrics",
        "/v1/files?purpose=fine-tune-results",
        "/v1/files?limit=10000",
        "/v1/files/file-metrics-{number}",
    ],
)
def test_figures_over_all_steps_of_a_job_are_slow_requests(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Elsewhere, a key's requests for long jobs would keep all threads from the requests of others."""
    job = client.post(f"{PATH}/with-accumulation", json=JOB).json()["id"]
    with client.app.state.database.writing() as session:  # type: ignore[attr-defined]
        session.execute(update(Job).values(status="succeeded", finished_at=1.0))
    slow = client.app.state.slow_work  # type: ignore[attr-defined]
    runs = counted_runs(slow, monkeypatch)
    answer = client.get(path.format(job=job, number=job.removeprefix("ftjob-")))
    assert answer.status_code == (409 if "compare" in path else 200)  # the job has no steps to compare
    assert len(runs) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/gradient-accumulation/training/{job}/events",
        "/gradient-accumulation/training/{job}/completions",
        "/gradient-accumulation/training/{job}/profile",
        "/v1/fine_tuning/jobs/{job}/events",
        "/v1/fine_tuning/jobs/{job}/events?after=ftevent-00000000000000000000000000",
        "/v1/fine_tuning/jobs/{job}/checkpoints",
    ],
)
def test_what_a_trainer_wrote_is_read_in_turns(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It may be large, and a key may request it many times at once."""
    job = client.post(f"{PATH}/with-accumulation", json=JOB).json()["id"]
    runs = counted_runs(client.app.state.result_work, monkeypatch)  # type: ignore[attr-defined]
    assert client.get(path.format(job=job)).status_code == (404 if "profile" in path else 200)
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("path", "limited"),
    [
        ("/gradient-accumulation/training", False),
        ("/gradient-accumulation/training?metadata[a]=1", True),
        ("/gradient-accumulation/training?user_id=a", True),
        ("/v1/fine_tuning/jobs", False),
        ("/v1/fine_tuning/jobs?metadata[a]=1", True),
        ("/gradient-accumulation/sweeps", True),
    ],
)
def test_lists_that_may_read_all_jobs_of_a_key_are_limited_by_themselves(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, limited: bool
) -> None:
    """They wait for each other, but not for uploads and other slow requests."""
    state = client.app.state  # type: ignore[attr-defined]
    lists, slow = counted_runs(state.list_work, monkeypatch), counted_runs(state.slow_work, monkeypatch)
    assert client.get(path).status_code == 200
    assert (len(lists), len(slow)) == (int(limited), 0)


@pytest.mark.parametrize(("texts", "at_once"), [(6000, {2}), (10, {8})])
def test_few_large_bodies_are_in_memory_at_a_time(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, texts: int, at_once: set[int]
) -> None:
    """Validated, a body may take a hundred times its size, until its request is answered."""
    running: list[int] = []
    most: list[int] = []

    async def submitted(*of: Any, **named: Any) -> JSONResponse:
        running.append(1)
        most.append(len(running))
        async with asyncio.timeout(10):
            while texts == 10 and len(most) < 8:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        running.pop()
        return JSONResponse({})

    monkeypatch.setattr(job_routes, "_submitted", submitted)
    body = {**JOB, "dataset_config": {"texts": ["a"] * texts}}
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(client.post, f"{PATH}/with-accumulation", json=body) for _ in range(8)]
        assert {each.result().status_code for each in sent} <= {200, 202}
    assert {max(most)} == at_once


def test_an_upload_on_a_full_disk_is_no_invalid_form(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("starlette.datastructures.UploadFile.write", full)
    with service(settings) as (client, mine):
        files = {"file": ("data.jsonl", b'{"text": "a"}\n')}
        answer = client.post("/v1/files", headers=mine, files=files, data={"purpose": "fine-tune"})
    assert answer.status_code == 507
    assert "is full: nothing was stored" in answer.json()["detail"]
