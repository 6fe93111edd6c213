"""Shapes of preference data, and what becomes of them."""

from typing import Any

import pytest

from app.contract.data_formats import BadLine, ChatPair, parse_row, sequences_of

ASKED = [{"role": "user", "content": "Q"}]
LOOKS = {"role": "assistant", "content": "Let me look."}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [answer("a")], "rejected": [answer("b")]},
        {"messages": ASKED, "chosen": answer("a"), "rejected": answer("b")},
        {"prompt": "Q", "chosen": [answer("a")], "rejected": [answer("b")]},
        {"prompt": "Q", "chosen": [*ASKED, answer("a")], "rejected": [*ASKED, answer("b")]},
        {"chosen": [*ASKED, answer("a")], "rejected": [*ASKED, answer("b")]},
        {
            "prompt": "Q",
            "messages": [*ASKED, answer("a")],
            "chosen": [*ASKED, answer("a")],
            "rejected": [*ASKED, answer("b")],
        },
        {
            "input": {"messages": ASKED},
            "preferred_output": [answer("a")],
            "non_preferred_output": [answer("b")],
        },
        {"instruction": "Q", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_pairs_of_chats_become_a_prompt_and_two_answers(row: dict[str, Any]) -> None:
    name, pair = parse_row(row)
    assert name == "preference"
    assert isinstance(pair, ChatPair)
    assert [each.content for each in pair.messages] == ["Q"]
    assert [[each.content for each in own] for own in (pair.chosen, pair.rejected)] == [["a"], ["b"]]


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": ASKED},
        {"messages": ASKED},
    ],
)
def test_answers_that_begin_alike_keep_the_prompt(given: dict[str, Any]) -> None:
    """The shared turns are context, not learned."""
    _, pair = parse_row({**given, "chosen": [LOOKS, answer("a")], "rejected": [LOOKS, answer("b")]})
    first, second = sequences_of(pair)
    contents = [[(each.content, each.weight) for each in own.messages] for own in (first, second)]  # type: ignore[union-attr]
    assert contents == [[("Q", 0), ("Let me look.", 0), (text, 1)] for text in ("a", "b")]


def test_texts_without_a_prompt_share_their_beginning() -> None:
    _, pair = parse_row({"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: yo"})
    assert [each.model_dump(include={"prompt", "completion"}) for each in sequences_of(pair)] == [
        {"prompt": "Human: hi Assistant:", "completion": text} for text in (" yes", " yo")
    ]


@pytest.mark.parametrize("label", [True, "true", "TRUE", False, "False"])
def test_a_label_may_be_text(label: Any) -> None:
    name, found = parse_row({"prompt": "p", "completion": "c", "label": label})
    assert name == "unpaired_preference"
    assert found.label is (str(label).lower() == "true")  # type: ignore[union-attr]


@pytest.mark.parametrize("label", [0, 1, "positive", 0.5])
def test_other_labels_are_ignored(label: Any) -> None:
    assert parse_row({"prompt": "p", "completion": "c", "label": label})[0] == "prompt_completion"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "a", "rejected": 3}, "not both text"),
        ({"chosen": [answer("a")], "rejected": "b"}, "not both text"),
        ({"chosen": [answer("a")], "rejected": [answer("b")]}, "no prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, "rejected"),
        ({"messages": ASKED, "chosen": ASKED, "rejected": [answer("b")]}, "assistant"),
        ({"input": "x", "preferred_output": [], "non_preferred_output": []}, "input"),
    ],
)
def test_what_is_no_pair_is_named(row: dict[str, Any], why: str) -> None:
    with pytest.raises(BadLine, match=why):
        parse_row(row)


def test_a_label_that_is_missing_is_named() -> None:
    with pytest.raises(BadLine, match="label: missing"):
        parse_row({"prompt": "p", "completion": "c"}, "unpaired_preference")


@pytest.mark.parametrize(
    "row",
    [
        {"system": "S", "prompt": "Q", "chosen": [*ASKED, answer("a")], "rejected": [*ASKED, answer("b")]},
        {"system": "S", "messages": ASKED, "chosen": [answer("a")], "rejected": [answer("b")]},
        {"system": "S", "prompt": ASKED, "chosen": "a", "rejected": "b"},
        {
            "prompt": ASKED,
            "chosen": [{"role": "system", "content": "S"}, *ASKED, answer("a")],
            "rejected": [{"role": "system", "content": "S"}, *ASKED, answer("b")],
        },
        {
            "messages": [{"role": "system", "content": "S"}, *ASKED],
            "chosen": [*ASKED, answer("a")],
            "rejected": [*ASKED, answer("b")],
        },
    ],
)
def test_a_pair_has_its_system_text_and_its_question_once(row: dict[str, Any]) -> None:
    _, pair = parse_row(row)
    assert isinstance(pair, ChatPair)
    assert [(each.role, each.content) for each in pair.messages] == [("system", "S"), ("user", "Q")]
    assert [[each.content for each in own] for own in (pair.chosen, pair.rejected)] == [["a"], ["b"]]
