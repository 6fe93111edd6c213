"""The third attack of 2026-11-28: a burst of one key's requests must delay those of other keys by little."""

import asyncio
import contextlib
import inspect
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from app.errors import NotFound, TooManyRequests
from app.jobs import configurations
from app.main import create_app
from app.settings import Settings
from app.storage import group_commit
from app.storage.database import Database
from app.storage.group_commit import GroupCommit
from app.storage.session import Session, Viewer
from app.storage.tables import Configuration
from app.submissions import admission
from app.web import event_stream
from app.web.dependencies import own_turn
from app.web.event_stream import EventStream
from app.web.thread_route import ThreadRoute
from tests.harness.requests import JOB, PATH, key_for, service


def committed(database: Database, keys: list[str]) -> list[str]:
    """The keys in the order in which their writes were prepared, if all arrive while the thread is busy."""
    prepared: list[str] = []
    busy = threading.Event()

    async def ask() -> None:
        group = GroupCommit(database)
        group.start()
        first = asyncio.ensure_future(group.write(database, busy.wait, lambda _, __: None))
        others = [
            asyncio.ensure_future(
                group.write(database.seen_by(Viewer(key, creator=key)), preparing(key), lambda _, __: None)
            )
            for key in keys
        ]
        await asyncio.sleep(0)
        busy.set()
        await asyncio.gather(first, *others)
        await asyncio.to_thread(group.close)

    def preparing(key: str) -> Callable[[], None]:
        return lambda: prepared.append(key)

    asyncio.run(ask())
    return prepared


def test_keys_take_turns_with_their_writes(database: Database) -> None:
    assert committed(database, ["a"] * 5 + ["b", "c", "b"]) == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_writes_whose_preparation_takes_long_are_committed_one_by_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "_PREPARE_SECONDS", -1.0)
    commits: list[Any] = []
    event.listen(database.engine, "commit", commits.append)
    committed(database, ["a"] * 5)
    assert len(commits) == 6


def test_a_key_with_too_many_jobs_is_refused_before_anything_is_planned(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(settings, max_queued_jobs=1) as (client, mine):
        request = {**JOB, "training_config": {"max_steps": 3}}
        headers = {**mine, "Idempotency-Key": "one"}
        first = client.post(f"{PATH}/with-accumulation", json=request, headers=headers)
        assert first.status_code == 202
        planned: list[object] = []
        monkeypatch.setattr(admission, "make_plan", lambda *given, **_: planned.append(given))
        other = {**JOB, "training_config": {"max_steps": 4}}
        refused = client.post(f"{PATH}/with-accumulation", json=other, headers=mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert not planned
        again = client.post(f"{PATH}/with-accumulation", json=request, headers=headers)
        assert again.json() == first.json()


def test_no_key_occupies_all_threads(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 requests of one key that take long, while another key's request is answered."""
    released = threading.Event()

    def find(session: Session, config_id: str) -> Configuration:
        released.wait(60)
        raise NotFound(config_id)

    monkeypatch.setattr(configurations, "find", find)
    with service(settings) as (client, mine), ThreadPoolExecutor(61) as clients:
        other = key_for(client.app.state.database)  # type: ignore[attr-defined]
        begun = [
            clients.submit(client.get, "/gradient-accumulation/config/cfg-slow", headers=mine)
            for _ in range(60)
        ]
        try:
            answer = clients.submit(client.get, "/gradient-accumulation/config", headers=other).result(30)
            assert answer.status_code == 200
            assert not any(each.done() for each in begun)
        finally:
            released.set()
        assert {each.result().status_code for each in begun} == {404}


@pytest.mark.sqlite
@pytest.mark.parametrize("with_keys", [True, False])
def test_reads_do_not_wait_for_writes_that_wait_for_the_database(settings: Settings, with_keys: bool) -> None:
    """Another process holds SQLite's write lock while a key sends more writes than there are threads."""
    app = create_app(settings)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client, ThreadPoolExecutor(61) as clients:
        database = app.state.database
        headers = key_for(database) if with_keys else {}
        other = sqlite3.connect(database.engine.url.database, isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            begun = [
                clients.submit(client.post, f"{PATH}/ftjob-nope/pause", headers=headers) for _ in range(60)
            ]
            try:
                for path in ("/gradient-accumulation/config", PATH):
                    answer = clients.submit(client.get, path, headers=headers).result(20)
                    assert answer.status_code == 200
                assert not any(each.done() for each in begun)
            finally:
                other.execute("ROLLBACK")
            assert {each.result().status_code for each in begun} == {404}


def test_a_turn_begins_after_the_body_has_arrived(client: TestClient) -> None:
    """A client may send it slowly."""
    routes = [route for route in client.app.routes if isinstance(route, ThreadRoute)]
    plain = [route for route in routes if not inspect.iscoroutinefunction(route.endpoint)]
    assert any(route.path.endswith("/retry") for route in plain)
    for route in plain:
        assert route.dependant.dependencies[-1].call is own_turn
        assert sum(each.call is own_turn for each in route.dependant.dependencies) == 1


def test_event_streams_leave_connections_for_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "connection_limit", lambda: 8)
    stream = EventStream(database)
    for key in ("a", "b"):
        for _ in range(2):
            stream.join("ftjob-1", key_id=key)
        with pytest.raises(TooManyRequests):
            stream.join("ftjob-1", key_id=key)
    with pytest.raises(TooManyRequests, match="Too many event streams"):
        stream.join("ftjob-1", key_id="c")
