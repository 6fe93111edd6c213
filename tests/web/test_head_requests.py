"""HEAD gives the status and headers of GET, without its body, on every route."""

import re

import pytest
from fastapi.testclient import TestClient

from tests.harness.requests import JOB, PATH


@pytest.fixture
def made(client: TestClient) -> dict[str, str]:
    """The value of each path parameter, by its name."""
    upload = {"file": ("data.jsonl", b'{"text": "a"}\n' * 100)}
    file = client.post("/v1/files", files=upload, data={"purpose": "fine-tune"}).json()["id"]
    job = client.post(f"{PATH}/with-accumulation", json=JOB).json()["id"]
    return {"file_id": file, "training_id": job, "fine_tuning_job_id": job, "identifier": job}


def test_head_answers_as_get_does(client: TestClient, made: dict[str, str]) -> None:
    paths = ["/", "/docs", "/openapi.json"]
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        filled = re.sub(r"{(\w+)}", lambda name: made.get(name[1], "none"), path)
        if "get" in methods:
            paths.append(filled)
    for path in paths:
        answer, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (answer.status_code, b""), path
        assert head.headers["content-type"] == answer.headers["content-type"], path
        assert head.headers.get("etag") == answer.headers.get("etag"), path
    assert len(paths) > 30


def test_head_of_a_stream_ends_at_once(client: TestClient, made: dict[str, str]) -> None:
    events = f"{PATH}/{made['training_id']}/events"
    head = client.head(events, headers={"Accept": "text/event-stream"})
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
    assert not client.app.state.events._followers  # type: ignore[attr-defined]


def test_head_is_refused_where_get_is(client: TestClient) -> None:
    assert client.head(f"{PATH}/any/cancel").status_code == 405
    assert client.head("/nowhere").status_code == 404
    evil = client.head(PATH, headers={"Host": "evil.example"})
    assert (evil.status_code, evil.content) == (403, b"")


def test_head_ignores_a_range(client: TestClient, made: dict[str, str]) -> None:
    head = client.head(f"/v1/files/{made['file_id']}/content", headers={"Range": "bytes=0-3"})
    assert (head.status_code, head.headers["content-length"]) == (200, "1400")


def test_any_etag_matches_an_asterisk(client: TestClient, made: dict[str, str]) -> None:
    path = f"{PATH}/{made['training_id']}"
    assert client.get(path, headers={"If-None-Match": "*"}).status_code == 304
    assert client.get(path, headers={"If-None-Match": 'W/"other", "another"'}).status_code == 200
