"""Text of tokens as they come: parts of characters, and stop sequences."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.tokenizers import made
from workers.inference.text_stream import TextStream
from workers.training.models.tiny_gpt2 import make_tokenizer

BYTES = make_tokenizer()
LEGACY = made("legacy")


def parts(tokenizer: Any, tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stops)
    found = []
    for token in tokens:
        found.append(stream.add(token))
        if stream.is_stopped:
            return found, True
    return [*found, stream.end()], stream.is_stopped


@pytest.mark.parametrize("tokenizer", [BYTES, LEGACY], ids=["bytes", "legacy"])
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=40))
def test_parts_make_up_the_decoded_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    found, _ = parts(tokenizer, tokens)
    assert "".join(found) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_character_of_several_tokens_comes_at_once() -> None:
    tokens = BYTES("a\N{SNOWMAN}b", add_special_tokens=False).input_ids
    assert parts(BYTES, tokens)[0] == ["a", "", "", "\N{SNOWMAN}", "b", ""]


def test_what_is_no_character_is_not_held_back_for_long() -> None:
    (part,) = BYTES("\N{SNOWMAN}", add_special_tokens=False).input_ids[1:2]
    found, _ = parts(BYTES, [part] * 100)
    assert sum(map(bool, found)) > 10
    assert "".join(found) == BYTES.decode([part] * 100)


@pytest.mark.parametrize("count", [1, 40, 3000])
@pytest.mark.parametrize("tokenizer", [BYTES, LEGACY], ids=["bytes", "legacy"])
def test_tokens_without_text_are_not_decoded_again_and_again(
    tokenizer: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tokenizer(text, add_special_tokens=False).input_ids for text in ("one", " two"))
    (special,) = tokenizer.convert_tokens_to_ids([tokenizer.eos_token])
    tokens = [*first, *[special] * count, *second]
    decode, decoded = tokenizer.decode, []

    def counted(ids: list[int], **options: Any) -> Any:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **options: counted(ids, **options))
    assert "".join(parts(tokenizer, tokens)[0]) == decode(tokens, skip_special_tokens=True)
    assert max(decoded) < 100


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokens = BYTES("a\N{SNOWMAN}", add_special_tokens=False).input_ids[:-1]
    assert "".join(parts(BYTES, tokens)[0]) == BYTES.decode(tokens)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_an_answer_ends_before_the_first_stop_sequence(text: str, stops: list[str]) -> None:
    found, is_stopped = parts(BYTES, BYTES(text, add_special_tokens=False).input_ids, tuple(stops))
    # The first to be complete ends the answer; of several that are complete at the same time, the longest.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert is_stopped == bool(ends)
    assert "".join(found) == (text[: min(ends)[1]] if ends else text)


def test_no_part_of_a_stop_sequence_is_sent() -> None:
    found, _ = parts(BYTES, BYTES("one STOP", add_special_tokens=False).input_ids, ("STOP",))
    assert "".join(found) == "one "
    assert all("S" not in part for part in found)


def test_what_looked_like_a_stop_sequence_is_sent_later() -> None:
    found, is_stopped = parts(BYTES, BYTES("STOR", add_special_tokens=False).input_ids, ("STOP",))
    assert found == ["", "", "", "STOR", ""]
    assert not is_stopped
