"""Regression tests for the twenty-fifth attack."""

import asyncio
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from app.contract.spec import Spec
from app.errors import TooManyRequests, Unprocessable
from app.jobs import transitions
from app.jobs.request_schemas import TrainingRequest
from app.models import starting_models
from app.security.rates import RateLimiter
from app.settings import Settings
from app.storage.database import Database
from app.web.body_limits import BodyLimits
from tests.harness.requests import JOB, PATH, submit
from tests.harness.submissions import started_from

METADATA = {"metadata[team]": "a"}
CHATS = {"messages": [[{"role": "assistant", "content": [{"text": "b"}]}]] * 3}


def test_totals_are_filtered_by_metadata(client: TestClient) -> None:
    """The filter was ignored: the totals of all jobs came back."""
    for team in ("a", "a", "b"):
        submit(client, metadata={"team": team})
    submit(client)
    totals = client.get("/gradient-accumulation/stats", params=METADATA)
    assert (totals.status_code, totals.json()["jobs"]) == (200, 2)
    for path in (PATH, "/v1/fine_tuning/jobs"):
        assert len(client.get(path, params=METADATA).json()["data"]) == 2


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/models", "/gradient-accumulation/gpus", "/gradient-accumulation/config"]
)
def test_other_routes_refuse_a_metadata_filter(client: TestClient, path: str) -> None:
    refused = client.get(path, params=METADATA)
    assert refused.status_code in (400, 422)  # OpenAI's clients expect 400
    assert "Unknown query parameter 'metadata[team]'" in refused.text


def test_chats_are_checked_apart_from_the_validation_of_the_body(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop validates bodies, and all requests wait for it."""
    called: list[Any] = []
    monkeypatch.setattr("app.datasets.dataset_config.parse_row", called.append)
    TrainingRequest.model_validate({**JOB, "dataset_config": CHATS})
    assert called == []
    submit(client, dataset_config=CHATS)
    assert called


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        ([{"role": "user", "content": "a"}], "messages.1 needs a message of the role assistant"),
        ([{"role": "assistant", "content": None}], "messages.1: "),
    ],
)
def test_a_chat_that_cannot_be_trained_on_is_refused(client: TestClient, chat: Any, why: str) -> None:
    good = [{"role": "assistant", "content": "b"}]
    for path, body in (
        (f"{PATH}/with-accumulation", {**JOB, "dataset_config": {"messages": [good, chat]}}),
        (
            f"{PATH}/with-accumulation",
            {**JOB, "dataset_config": {"messages": [good, chat]}, "dry_run": True},
        ),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == 422
        assert refused.json()["error"]["param"] == "dataset_config"
        assert why in refused.json()["error"]["message"], json.dumps(refused.json())


def test_a_busy_event_loop_does_not_turn_off_the_rate_limit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop comes back to a request only after the time that a storage has."""
    monkeypatch.setattr("app.security.rates._STORAGE_SECONDS", 0.0)
    limiter = RateLimiter("2/hour", "memory://")
    hit = limiter._limiter.hit

    async def resumed_late(*of: Any, **named: Any) -> bool:
        await asyncio.sleep(0)
        return await hit(*of, **named)

    monkeypatch.setattr(limiter._limiter, "hit", resumed_late)

    async def exceed() -> None:
        for _ in range(3):
            await limiter.count("key-1")

    with pytest.raises(TooManyRequests):
        asyncio.run(exceed())


def test_times_of_an_unknown_time_zone_are_read_as_utc(client: TestClient) -> None:
    table = pa.table({"text": ["a"], "at": pa.array([10**15], pa.timestamp("us", "Mars/Base"))})
    content = io.BytesIO()
    pq.write_table(table, content)
    uploaded = client.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.parquet", content.getvalue())}
    )
    assert uploaded.status_code == 200, uploaded.text


def test_adapters_whose_base_was_deleted_say_so(database: Database, settings: Settings) -> None:
    spec = Spec.model_validate(spec_of(database, started_from(database, "ftjob-gone")))
    with pytest.raises(Unprocessable, match="needs the model of the job ftjob-gone, which has been deleted"):
        starting_models._below_layers(spec.model, settings)


def spec_of(database: Database, job_id: str) -> Any:
    """The spec of a job."""
    with database.reading() as session:
        return transitions.get(session, job_id).spec


def test_a_large_body_s_turn_ends_when_its_response_begins(settings: Settings) -> None:
    """Clients that did not read their responses kept all turns."""
    bodies = BodyLimits(settings)
    scope = {"type": "http", "method": "POST", "path": f"{PATH}/with-accumulation"}
    content = b'{"x": [' + b"1," * 6000 + b"1]}"

    async def receive() -> Any:
        return {"type": "http.request", "body": content}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)  # the client does not read it

    async def request(answers: bool, begun: asyncio.Event) -> None:
        async with bodies.limited(scope, receive, send, None) as (limited, answering):
            await limited()
            begun.set()
            if not answers:
                await asyncio.sleep(3600)
            await answering({"type": "http.response.start", "status": 200, "headers": []})
            await answering({"type": "http.response.body", "body": b""})

    async def others_wait(answers: bool) -> bool:
        begun = [asyncio.Event() for _ in range(5)]
        tasks = [asyncio.create_task(request(answers, each)) for each in begun]
        try:
            await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 1)
        except TimeoutError:
            return True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return False

    assert asyncio.run(others_wait(answers=False))
    assert not asyncio.run(others_wait(answers=True))
