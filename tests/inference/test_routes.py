"""The routes of chats and completions, with a worker that answers from a script."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from sqlalchemy import select

from app.contract.inference import (
    AnswerPart,
    ChoiceDelta,
    InferenceError,
    InferenceOrder,
    TokenLogprob,
    Usage,
)
from app.inference import requests, routes
from app.models.trained_models import name_of
from app.planning.catalogue import TINY_GPT2
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import InferenceRequest, Job, Key, Worker
from tests.harness.requests import key_for
from tests.harness.submissions import succeeded

MODEL = "accrue/tiny-gpt2"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = Usage(prompt_tokens=3, completion_tokens=2)

Script = Callable[[InferenceOrder], list[AnswerPart]]


@pytest.fixture
def database(client: TestClient) -> Database:
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    with database.writing() as session:
        worker = {"hostname": "h", "started_at": database_now(), "devices": [], "running": []}
        session.add(Worker(id="worker-1", heartbeat_at=database_now(), **worker))
    return database


@contextmanager
def answering(database: Database, script: Script, seconds: float = 0.0) -> Iterator[list[InferenceOrder]]:
    """Answers every request from a script; yields the requests."""
    ended, seen = threading.Event(), list[InferenceOrder]()

    def run() -> None:
        while not ended.is_set():
            with database.writing() as session:
                claimed = requests.claim(session, "test", 10)
            for each in claimed:
                seen.append(InferenceOrder.model_validate(each.order))
                for number, part in enumerate(script(seen[-1])):
                    with database.writing() as session:
                        requests.store(session, "test", {(each.id, number): part})
                    time.sleep(seconds)
            ended.wait(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def says(*texts: str, usage: Usage = USAGE) -> Script:
    parts = [AnswerPart(deltas=(ChoiceDelta(index=0, text=text),)) for text in texts]
    last = AnswerPart(deltas=(ChoiceDelta(index=0, finish_reason="stop"),), usage=usage)
    return lambda order: [*parts, last]


def fails(**error: Any) -> Script:
    return lambda order: [AnswerPart(error=InferenceError(**error))]


def chunks_of(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_what_the_openai_client_sends_as_null_is_accepted(client: TestClient, database: Database) -> None:
    """An answer's message that is passed back has fields that are null."""
    nulls = {"annotations": None, "audio": None, "function_call": None, "refusal": None, "tool_calls": None}
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Hi", **nulls}, *HELLO["messages"]]
    with answering(database, says("Yes")) as seen:
        chat = client.post(CHAT, json={**HELLO, "messages": messages, "n": None})
        completion = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "n": None})
    assert (chat.status_code, completion.status_code) == (200, 200)
    assert [order.choices for order in seen] == [1, 1]
    refused = client.post(CHAT, json={**HELLO, "messages": [{**messages[1], "audio": {"id": "x"}}]})
    assert refused.status_code == 400


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_the_reasoning_of_an_answer_may_have_any_of_its_names(
    client: TestClient, database: Database, name: str
) -> None:
    answered = {"role": "assistant", "content": "A", "reasoning": None, name: "because"}
    turns = [{"role": "user", "content": "Q"}, answered]
    asked = {"role": "user", "content": "And?"}
    with answering(database, says("Hello")) as seen:
        answer = client.post(CHAT, json={**HELLO, "messages": [*turns, asked]})
    assert answer.status_code == 200, answer.text
    assert seen[0].messages is not None
    assert seen[0].messages[1] == {"role": "assistant", "content": "A", "reasoning_content": "because"}


def test_a_chat_as_a_whole(client: TestClient, database: Database) -> None:
    with answering(database, says("Hel", "lo")) as seen:
        answer = client.post(CHAT, json={**HELLO, "temperature": 0, "stop": "x", "seed": 3, "top_k": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    (order,) = seen
    assert (order.stop, order.sampling.seed, order.sampling.top_k) == (("x",), 3, 2)
    assert order.messages == ({"role": "user", "content": "Hello"},)
    assert order.max_tokens == 1024
    assert not order.streams


def test_a_stream_has_chunks_usage_and_an_end(client: TestClient, database: Database) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    with answering(database, says("Hel", "lo"), seconds=0.05):
        answer = client.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = chunks_of(answer)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:3]] == ["Hel", "lo"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_completions_of_several_prompts_with_log_probabilities(
    client: TestClient, database: Database
) -> None:
    def script(order: InferenceOrder) -> list[AnswerPart]:
        token = TokenLogprob(token="a", bytes=(97,), logprob=-0.5)
        return [
            AnswerPart(
                deltas=tuple(
                    ChoiceDelta(index=index, text="a", logprobs=(token,), finish_reason="length")
                    for index in range(len(order.prompts) * order.choices)
                ),
                usage=USAGE,
            )
        ]

    body = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "logprobs": 0}
    with answering(database, script) as seen:
        answer = client.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{}],
        "text_offset": [0],
    }
    assert seen[0].prompts == ("x", "y")
    with answering(database, script) as seen:
        client.post(COMPLETIONS, json={"model": MODEL, "prompt": [[1, 2], [3]]})
        client.post(COMPLETIONS, json={"model": MODEL, "prompt": [1, 2]})
    assert [order.prompts for order in seen] == [((1, 2), (3,)), ((1, 2),)]


def test_tools_and_content_parts_reach_the_template(client: TestClient, database: Database) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    with answering(database, says("ok")) as seen:
        client.post(CHAT, json={"model": MODEL, "messages": messages, "tools": [tool]})
        client.post(CHAT, json={**HELLO, "tools": [tool], "tool_choice": "none"})
    assert seen[0].tools == (tool,)
    assert seen[0].messages is not None
    assert seen[0].messages[0] == {"role": "user", "content": "ab"}
    assert seen[0].messages[1]["tool_calls"] == [call]
    assert seen[1].tools is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_part_has_its_status(
    client: TestClient, database: Database, stream: bool
) -> None:
    too_long = fails(status=400, code="context_length_exceeded", message="Too long.", field="messages")
    with answering(database, too_long):
        answer = client.post(CHAT, json={**HELLO, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    with answering(database, fails(status=503, code="unavailable", message="Later.")):
        assert client.post(CHAT, json={**HELLO, "stream": stream}).status_code == 503


def test_an_error_within_a_stream_is_an_event(client: TestClient, database: Database) -> None:
    def script(order: InferenceOrder) -> list[AnswerPart]:
        broken = InferenceError(status=503, code="unavailable", message="It ended.")
        return [AnswerPart(deltas=(ChoiceDelta(index=0, text="a"),)), AnswerPart(error=broken)]

    with answering(database, script, seconds=0.1):
        answer = client.post(CHAT, json={**HELLO, "stream": True})
    assert answer.status_code == 200
    assert chunks_of(answer)[-2]["error"]["message"] == "It ended."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "not both"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usge": True}}, "did you mean stream_options.include_usage?"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_a_request_cannot_say(client: TestClient, changes: dict[str, Any], message: str) -> None:
    answer = client.post(CHAT, json={**HELLO, **changes})
    assert answer.status_code == 400
    assert message in answer.json()["detail"]


def test_a_stream_begins_before_the_first_token(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.answers.KEEPALIVE_SECONDS", 0.1)

    def slow(order: InferenceOrder) -> list[AnswerPart]:
        time.sleep(0.5)
        return says("ok")(order)

    with answering(database, slow):
        answer = client.post(CHAT, json={**HELLO, "stream": True})
    assert answer.text.startswith(": still here")
    assert chunks_of(answer)[-1] == "[DONE]"


def test_a_part_of_a_character_is_named_by_its_bytes(client: TestClient, database: Database) -> None:
    token = TokenLogprob(token="\N{REPLACEMENT CHARACTER}", bytes=(0xE2,), logprob=-1.0)
    part = AnswerPart(
        deltas=(ChoiceDelta(index=0, text="", logprobs=(token,), finish_reason="length"),), usage=USAGE
    )
    with answering(database, lambda order: [part]):
        answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "logprobs": 1}).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2"]
    echo = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "logprobs": 1, "echo": True})
    assert (echo.status_code, "echo" in echo.json()["detail"]) == (400, True)


def test_one_request_asks_for_few_answers(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": ["a"] * 64, "n": 16})
    assert answer.status_code == 400
    assert "128" in answer.json()["detail"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, {"a": 1}])
def test_a_prompt_has_something(client: TestClient, prompt: Any) -> None:
    assert client.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt}).status_code == 400


def test_another_key_s_model_looks_like_a_missing_one(
    client: TestClient, database: Database, settings: Settings
) -> None:
    job_id, folder = succeeded(database, settings)
    (folder / "config.json").write_text(json.dumps(TINY_GPT2))
    first, second, reader = key_for(database), key_for(database), key_for(database, "read")
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        job.owner = session.scalars(select(Key.id).order_by(Key.id)).first()
        body = {"model": name_of(job), "prompt": "a"}
    with answering(database, says("ok")) as seen:
        mine, theirs, reads = (
            client.post(COMPLETIONS, json=body, headers=header) for header in (first, second, reader)
        )
    assert (mine.status_code, theirs.status_code, reads.status_code) == (200, 404, 403), mine.text
    assert theirs.json()["error"]["code"] == "model_not_found"
    assert len(seen) == 1


def test_one_key_awaits_only_so_many_answers(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = client.app.state.inference_limit  # type: ignore[attr-defined]
    held = [limit.acquire(None) for _ in range(routes.MAX_PER_KEY)]
    answer = client.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    for end in held:
        end()
    with answering(database, says("ok")):
        assert client.post(CHAT, json=HELLO).status_code == 200
    assert limit._open.total() == 0


def test_a_request_that_nobody_takes_ends(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.answers.UNCLAIMED_SECONDS", 0.5)
    monkeypatch.setattr("app.inference.answers._CHECK_SECONDS", 0.1)
    answer = client.post(CHAT, json=HELLO)
    assert answer.status_code == 503
    assert "ACCRUE_INFERENCE" in answer.json()["detail"]
    with database.reading() as session:
        assert not requests.any_unclaimed(session)


@pytest.mark.parametrize(
    "name", ["ft:gpt-4o-mini-2024-07-18:acme::abc123", "ft:none", "nobody/nothing", "../../etc/passwd", "a b"]
)
@pytest.mark.usefixtures("database")
def test_a_model_of_another_service_is_unknown(client: TestClient, name: str) -> None:
    for path, given in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "Hello"})):
        answer = client.post(path, json={**given, "model": name})
        assert answer.status_code == 404, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_an_answer_that_comes_fast_ends_once_the_client_has_left(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is never silent for seconds does not keep the service from noticing."""
    monkeypatch.setattr(routes, "KEEPALIVE_SECONDS", 0.1)

    async def left(request: Request) -> bool:
        return True

    monkeypatch.setattr(Request, "is_disconnected", left)
    with answering(database, says(*"abcdefghij" * 30), seconds=0.02):
        answer = client.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.json()["detail"]) == (503, "The client has left.")
    assert _stored(database) == 0


def _stored(database: Database) -> int:
    with database.reading() as session:
        return session.query(InferenceRequest).count()
