"""Answers in OpenAI's shapes: those of the response models, and quick even with many log probabilities."""

import json
from typing import Any

import pytest

from app.contract.inference import Alternative, AnswerPart, ChoiceDelta, TokenLogprob, Usage
from app.inference.formats import AnswerFormat, ChatFormat, CompletionFormat
from app.inference.schemas import ChatCompletion, CompletionResponse

USAGE = Usage(prompt_tokens=3, completion_tokens=4)
TOP = tuple(
    Alternative(token=text, bytes=tuple(text.encode()), logprob=-1.5) for text in ("a", "é", "\ufffd")
)
TOKEN = TokenLogprob(token="é", bytes=tuple("é".encode()), logprob=-0.25, top=TOP)


def parts(choices: int, tokens: int, logprobs: bool) -> list[AnswerPart]:
    """An answer that came token by token."""
    deltas = [
        AnswerPart(
            deltas=tuple(
                ChoiceDelta(index=index, text="é", logprobs=(TOKEN,) if logprobs else None)
                for index in range(choices)
            )
        )
        for _ in range(tokens)
    ]
    ended = tuple(ChoiceDelta(index=index, finish_reason="length") for index in range(choices))
    return [*deltas, AnswerPart(deltas=ended, usage=USAGE)]


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize(
    ("form", "model"),
    [
        (ChatFormat("req-1", 'a "model"', with_usage=True), ChatCompletion),
        (CompletionFormat("req-1", 'a "model"', with_usage=True), CompletionResponse),
    ],
)
def test_a_whole_answer_has_the_shape_of_its_model(
    form: AnswerFormat, model: type[ChatCompletion] | type[CompletionResponse], logprobs: bool
) -> None:
    content = form.whole(parts(2, 3, logprobs))
    answer = model.model_validate_json(content)
    assert json.loads(content) == answer.model_dump(mode="json"), "all members are there, and no others"
    assert (answer.model, answer.usage and answer.usage.total_tokens) == ('a "model"', 7)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    for choice in answer.choices:
        assert (choice.logprobs is not None) == logprobs
    if isinstance(answer, ChatCompletion):
        assert answer.choices[0].message.content == "ééé"
        of_tokens = answer.choices[0].logprobs
        assert of_tokens is None or [len(each.top_logprobs) for each in of_tokens.content or ()] == [3] * 3
    else:
        assert answer.choices[1].text == "ééé"
        lists = answer.choices[1].logprobs
        assert lists is None or lists.text_offset == [0, 1, 2]


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_a_large_answer_is_serialised_token_by_token(
    monkeypatch: pytest.MonkeyPatch, form: type[ChatFormat] | type[CompletionFormat]
) -> None:
    """While an object is serialised, no other thread runs."""
    lengths: list[int] = []
    honest = json.dumps

    def measured(value: object, **options: Any) -> str:
        written = honest(value, **options)
        lengths.append(len(written))
        return written

    monkeypatch.setattr("app.inference.formats.json.dumps", measured)
    content = form("req-1", "m", with_usage=True).whole(parts(2, 300, logprobs=True))
    assert len(content) > 40_000
    assert max(lengths) < 2000
