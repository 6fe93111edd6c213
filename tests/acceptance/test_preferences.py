"""Preference training through the unmodified openai client: from a chat model to one tuned on pairs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness.runs import until
from tests.harness.service import Accrue, running

pytestmark = pytest.mark.thorough

QUESTION: Any = {"role": "user", "content": "Say hello."}
GOOD: Any = {"role": "assistant", "content": "ab"}
BAD: Any = {"role": "assistant", "content": "yz"}
CHATS = [{"messages": [QUESTION, answer]} for answer in (GOOD, BAD)] * 16
PAIRS = [{"input": {"messages": [QUESTION]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}] * 32


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    with running(tmp_path_factory.mktemp("preferences")) as accrue:
        accrue.serve()
        accrue.start("worker", ACCRUE_INFERENCE="auto")
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
        yield accrue


@pytest.fixture
def client(accrue: Accrue) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{accrue.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def uploaded(client: openai.OpenAI, folder: Path, lines: list[Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return client.files.create(file=path, purpose="fine-tune").id


def trained(accrue: Accrue, client: openai.OpenAI, **given: Any) -> Any:
    job = client.fine_tuning.jobs.create(**given)
    ended = accrue.ended(job.id)
    assert ended["status"] == "succeeded", ended["error"]
    return client.fine_tuning.jobs.retrieve(job.id)


def said(client: openai.OpenAI, model: str) -> str:
    """The model's answer, which its stream repeats."""
    asked: Any = {"model": model, "messages": [QUESTION], "max_tokens": 4, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    streamed = [chunk.choices for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(each[0].delta.content or "" for each in streamed if each) == whole
    return str(whole)


def test_a_chat_model_learns_which_of_two_answers_is_preferred(
    accrue: Accrue, client: openai.OpenAI, tmp_path: Path
) -> None:
    taught = trained(
        accrue,
        client,
        model="accrue/tiny-gpt2",
        training_file=uploaded(client, tmp_path, CHATS),
        hyperparameters={"batch_size": 8, "n_epochs": 5, "learning_rate_multiplier": 100},
        seed=1,
    )
    assert said(client, taught.fine_tuned_model) in ("ab", "yz")
    for preferred in (PAIRS, [flipped(pair) for pair in PAIRS]):
        tuned = trained(
            accrue,
            client,
            model=taught.fine_tuned_model,
            training_file=uploaded(client, tmp_path, preferred),
            method={"type": "dpo", "dpo": {"hyperparameters": {
                "beta": 0.1, "batch_size": 8, "n_epochs": 5, "learning_rate_multiplier": 500,
            }}},
            seed=1,
        )  # fmt: skip
        assert tuned.method.type == "dpo"
        assert said(client, tuned.fine_tuned_model) == preferred[0]["preferred_output"][0]["content"]


def flipped(pair: dict[str, Any]) -> dict[str, Any]:
    return {
        **pair,
        "preferred_output": pair["non_preferred_output"],
        "non_preferred_output": pair["preferred_output"],
    }


def test_an_unsuitable_method_is_a_bad_request(client: openai.OpenAI, tmp_path: Path) -> None:
    pairs, chats = (uploaded(client, tmp_path, lines) for lines in (PAIRS, CHATS))
    for given, param in (
        ({"training_file": chats, "method": {"type": "dpo"}}, "method.type"),
        ({"training_file": pairs, "method": {"type": "supervised"}}, "method.type"),
        ({"training_file": pairs, "method": {"type": "reinforcement"}}, "method.type"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.fine_tuning.jobs.create(model="accrue/tiny-gpt2", **given)  # type: ignore[arg-type]
        assert caught.value.param == param
