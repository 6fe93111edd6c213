import json
import re

import pytest

from app.contract.data_formats import BadLine, Chat, parse_line, parse_row, unused_keys


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ({"text": "a"}, "text"),
        ({"prompt": "a", "completion": "b", "id": 7}, "prompt_completion"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
    ],
)
def test_the_keys_determine_the_format(line: dict[str, object], form: str) -> None:
    assert parse_line(json.dumps(line))[0] == form


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "expected a JSON object, found list"),
        (b"{}", "expected the keys"),
        (b'{"text": 1}', "text: "),
        (b'{"text": ""}', "text: "),
        (b'{"prompt": "a", "completion": ""}', "completion: "),
        (b'{"messages": []}', "messages: "),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "needs the role assistant"),
        (b'{"messages": [{"role": "boss", "content": "a"}]}', "role"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_the_error_of_a_bad_line_says_what_is_wrong(raw: bytes, problem: str) -> None:
    with pytest.raises(BadLine, match=problem):
        parse_line(raw)


def test_lines_of_one_file_are_of_one_format() -> None:
    with pytest.raises(BadLine, match="this is a text line, but the format is messages"):
        parse_line(b'{"text": "a"}', "messages")


@pytest.mark.parametrize("label", ["True", "false", "TRUE "])
def test_a_text_s_label_keeps_its_spelling(label: str) -> None:
    """It is the name of a class; only labelled answers have true and false."""
    form, sample = parse_line(json.dumps({"text": "a", "label": label}))
    assert (form, sample.label) == ("classification", label.strip() if False else label)


@pytest.mark.parametrize(
    "row",
    [
        {
            "system": "S",
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
        },
        {
            "system": "S",
            "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
        },
        {
            "system": "S",
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
        },
        {"system": "S", "instruction": "Q", "output": "A"},
    ],
)
def test_a_system_column_begins_any_chat(row: dict[str, object]) -> None:
    _, chat = parse_row(row)
    assert isinstance(chat, Chat)
    assert [each.content for each in chat.messages] == ["S", "Q", "A"]
    assert not unused_keys(chat)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_an_answer_s_reasoning_has_one_name(name: str) -> None:
    turns = [
        {"role": "user", "content": "Q", name: None},
        {"role": "assistant", "content": "A", name: "because", "reasoning_content": "because"},
    ]
    _, chat = parse_row({"messages": turns})
    assert isinstance(chat, Chat)
    assert [each.reasoning_content for each in chat.messages] == [None, "because"]
    assert not unused_keys(chat)


@pytest.mark.parametrize("system", [5, ["S"], {"a": 1}, None, "  "])
def test_a_system_column_that_is_no_text_is_left_alone(system: object) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    _, chat = parse_row({"messages": turns, "system": system})
    assert isinstance(chat, Chat)
    assert [each.content for each in chat.messages] == ["Q", "A"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("Prompt", "Completion "), '{"completion": "Completion ", "prompt": "Prompt"}'),
        (("prompt", "answer"), '{"prompt": "question", "completion": "answer"}'),
        (("Question", "Answer", "label"), '{"prompt": "question", "completion": "answer"}'),
        (("TEXT", "Id"), '{"text": "TEXT"}'),
    ],
)
def test_columns_that_are_meant_are_suggested(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadLine, match=re.escape(f"columns={said}")):
        parse_line(json.dumps(dict.fromkeys(keys, "a")))
