"""Samples in pieces, with tokenizers that treat the beginning of a text differently."""

import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.harness.tokenizers import made, tokens_of
from workers.training.data.piece_boundaries import encode_continued, marks_beginnings
from workers.training.models.tiny_gpt2 import make_tokenizer

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the answer is 4"},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "\n4 caf\u00e9"},
]


def prompt_of(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of which an answer is the continuation at inference."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


KINDS = ["legacy", "first", "always"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_at_inference_is_the_beginning_of_what_is_trained(kind: str) -> None:
    tokenizer = made(kind)
    tokens, counts = tokens_of(tokenizer, {"messages": CHAT})
    for answer in (1, 3):
        prompt = prompt_of(tokenizer, CHAT[:answer])
        assert tokens[: len(prompt)] == prompt
        assert not counts[len(prompt) - 1]
        assert counts[len(prompt)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("completion", [" 4", "the", "\n4", " caf\u00e9", "\u2603", "lo"])
def test_prompt_and_completion_read_as_their_text(kind: str, completion: str) -> None:
    tokenizer = made(kind)
    tokens, counts = tokens_of(tokenizer, {"prompt": "the answer is", "completion": completion})
    assert tokenizer.decode(tokens, skip_special_tokens=True) == f"the answer is{completion}"
    prompt = tokenizer("the answer is", add_special_tokens=False).input_ids
    assert tokens[: len(prompt)] == prompt
    assert counts == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_tokenised_as_by_its_tokenizer(kind: str) -> None:
    tokenizer = made(kind)
    tokens, _ = tokens_of(tokenizer, {"text": "hello world"})
    assert tokens[:-1] == tokenizer("hello world", add_special_tokens=False).input_ids


def test_only_tokenizers_that_need_it_are_treated_so() -> None:
    assert all(marks_beginnings(made(kind)) for kind in KINDS)
    assert not marks_beginnings(make_tokenizer())


def byte_level() -> Any:
    """A tokenizer on bytes that puts a space in front of texts, and whose spaces depend on what follows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a  b  c", "a\n\nb \n\nc", "the answer is 4\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize("prompt", ["a  ", "a \n", "the answer:\n\n", "a", " ", "\n\n"])
def test_a_prompt_is_tokenised_as_it_is_alone(prompt: str) -> None:
    tokenizer = byte_level()
    assert marks_beginnings(tokenizer)
    tokens, counts = tokens_of(tokenizer, {"prompt": prompt, "completion": "b"})
    alone = tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokens[: len(alone)] == alone
    assert counts == [False] * len(alone) + [True] * (len(tokens) - len(alone))


def test_boundaries_that_tokens_cross_take_time_in_proportion_to_the_text() -> None:
    tokenizer = byte_level()
    pieces = ["a\n", "\nb"] * 4000
    started = time.monotonic()
    encoded = encode_continued(tokenizer, [pieces])
    assert time.monotonic() - started < 10  # a hundred times as much as it takes
    assert "".join(map(tokenizer.decode, encoded)).split() == "".join(pieces).split()
