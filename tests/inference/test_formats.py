"""Answers in OpenAI's shapes: those of the response models, and quick even with many log probabilities."""

import json
import threading
import time

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


def test_other_threads_run_while_a_large_answer_is_written() -> None:
    answer = parts(8, 1000, logprobs=True)
    form = ChatFormat("req-1", "m", with_usage=True)
    working = threading.Thread(target=form.whole, args=(answer,))
    longest, last = 0.0, time.perf_counter()
    working.start()
    turns = 0
    while working.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last, turns = max(longest, now - last), now, turns + 1
    assert turns > 3, f"only {turns} turns, the longest {longest:.2f} s"
