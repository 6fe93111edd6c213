import json

import pytest

from app.contract.data_formats import BadLine, parse_line


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
