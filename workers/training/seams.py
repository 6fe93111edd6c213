"""Tokenises texts in pieces with tokenizers that treat the beginning of a text differently.

SentencePiece's tokenizers (Llama 2, Mistral and others) put a space in front of a text. If the pieces of a
sample were tokenised as texts of their own, the model would learn a space at every seam, which it does not
see at inference.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_PROBES = ("the", " 4", "\u00e9")
_BEFORE = ("\n", ":", "0")
"""What a piece is preceded by if it cannot be tokenised together with what is really before it."""

Token = tuple[int, int, int]
"""A token's id, and where its characters begin and end."""


def marks_beginnings(tokenizer: Any) -> bool:
    """Whether the tokenizer turns a piece into other tokens at the beginning of a text than after a line."""
    if not getattr(tokenizer, "is_fast", False):
        return False  # it does not tell where its tokens are
    line, *alone = tokenizer(["x\n", *_PROBES], add_special_tokens=False).input_ids
    after = tokenizer([f"x\n{probe}" for probe in _PROBES], add_special_tokens=False).input_ids
    return any(line + own != both for own, both in zip(alone, after, strict=True))


def encode_continued(tokenizer: Any, examples: Sequence[Sequence[str]]) -> list[list[int]]:
    """The tokens of each piece, as they are where the pieces of an example follow each other.

    Where the example as a whole has a token that reaches across a seam, the text before the seam is tokenised
    without the rest, as at inference, and the rest as its continuation.
    """
    wholes = _tokens(tokenizer, ["".join(pieces) for pieces in examples])
    encoded: list[list[int]] = []
    for pieces, whole in zip(examples, wholes, strict=True):
        encoded += _divided(tokenizer, list(pieces), whole)
    return encoded


def _divided(tokenizer: Any, pieces: list[str], whole: list[Token]) -> list[list[int]]:
    """The tokens of each piece of an example.

    Args:
        whole: the tokens of all pieces as one text.
    """
    parts: list[list[int]] = []
    while (crossed := _first_crossed(whole, pieces)) is not None:
        before, pieces = pieces[:crossed], pieces[crossed:]
        text = "".join(before)
        tokens = _continuation(tokenizer, text) if parts else _tokens(tokenizer, [text])[0]
        parts += _by_piece(tokens, before)
        whole = _continuation(tokenizer, "".join(pieces))
    return parts + _by_piece(whole, pieces)


def _first_crossed(tokens: Sequence[Token], pieces: Sequence[str]) -> int | None:
    """The number of pieces before the first seam that a token reaches across."""
    seams = list(accumulate(map(len, pieces)))[:-1]
    inside = {at for _, start, end in tokens for at in range(start + 1, end)}
    return next((number for number, at in enumerate(seams, 1) if at in inside), None)


def _continuation(tokenizer: Any, text: str) -> list[Token]:
    """The tokens of a text that continues another one."""
    for before in _BEFORE:
        tokens = _tokens(tokenizer, [before + text])[0]
        at = len(before)
        if not any(start < at < end for _, start, end in tokens):
            return [(token, start - at, end - at) for token, start, end in tokens if end > at]
    return _tokens(tokenizer, [text])[0]


def _by_piece(tokens: Sequence[Token], pieces: Sequence[str]) -> list[list[int]]:
    """The tokens of each piece: those that end in it."""
    ends = list(accumulate(map(len, pieces)))
    found: list[list[int]] = [[] for _ in pieces]
    piece = 0
    for token, _, end in tokens:
        while piece + 1 < len(ends) and end > ends[piece]:
            piece += 1
        found[piece].append(token)
    return found


def _tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[Token]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    return [
        [(token, start, end) for token, (start, end) in zip(ids, offsets, strict=True)]
        for ids, offsets in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    ]
