"""Tokenises texts in pieces with tokenizers that treat the beginning of a text differently.

SentencePiece's tokenizers (Llama 2, Mistral and others) put a space in front of a text. If the pieces of a
sample were tokenised as texts of their own, the model would learn a space at every boundary, which it does
not see at inference.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
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

    If a token of the whole example crosses a boundary, or if the first piece has other tokens there than
    alone, the text up to the boundary is tokenised by itself, as at inference, and the rest as its
    continuation.
    """
    wholes = _tokens(tokenizer, ["".join(pieces) for pieces in examples])
    firsts = _tokens(tokenizer, [pieces[0] for pieces in examples])
    encoded: list[list[int]] = []
    for pieces, whole, first in zip(examples, wholes, firsts, strict=True):
        encoded += _divided(tokenizer, pieces, whole, first)
    return encoded


def _divided(
    tokenizer: Any, pieces: Sequence[str], whole: list[Token], first: list[Token]
) -> list[list[int]]:
    """The tokens of each piece of an example.

    Args:
        whole: the tokens of all pieces as one text.
        first: those of the first piece as a text.
    """
    crossed = _crossed(whole, pieces)
    by_piece = _by_piece(whole, pieces)
    if 1 not in crossed and by_piece[0] != [token for token, _, _ in first]:
        crossed = [1, *crossed]
    if not crossed or len(pieces) == 1:
        return by_piece
    cuts = [0, *crossed, len(pieces)]
    segments = [pieces[start:end] for start, end in pairwise(cuts)]
    beginning = first if len(segments[0]) == 1 else _tokens(tokenizer, ["".join(segments[0])])[0]
    tokens = [beginning, *_continuations(tokenizer, ["".join(segment) for segment in segments[1:]])]
    parts = (_by_piece(own, segment) for own, segment in zip(tokens, segments, strict=True))
    return [piece for part in parts for piece in part]


def _crossed(tokens: Sequence[Token], pieces: Sequence[str]) -> list[int]:
    """The numbers of pieces before each boundary that a token reaches across."""
    boundaries = {at: number for number, at in enumerate(accumulate(map(len, pieces[:-1])), 1)}
    inside = {at for _, start, end in tokens if end - start > 1 for at in range(start + 1, end)}
    return sorted(number for at, number in boundaries.items() if at in inside)


def _continuations(tokenizer: Any, texts: list[str]) -> list[list[Token]]:
    """The tokens of texts that continue others."""
    found = _tokens(tokenizer, texts)  # kept for texts whose first token merges with every text in `_BEFORE`
    left = list(range(len(texts)))
    for before in _BEFORE:
        at, crossing = len(before), []
        for number, tokens in zip(left, _tokens(tokenizer, [before + texts[n] for n in left]), strict=True):
            if any(start < at < end for _, start, end in tokens):
                crossing.append(number)
            else:
                found[number] = [(token, start - at, end - at) for token, start, end in tokens if end > at]
        left = crossing
        if not left:
            break
    return found


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
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    return [
        [(token, start, end) for token, (start, end) in zip(ids, offsets, strict=True)]
        for ids, offsets in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    ]
