"""Turns the tokens of an answer into text as they come, and ends it at stop sequences."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_TOKENS = 8
"""No character takes this many tokens: if they have not completed one, its incomplete part is returned."""
_MOST_WITHOUT_TEXT = 32
"""If this many tokens in a row gave no text, as special tokens do, the first of them are dropped."""


class TextStream:
    """The text of one answer.

    Tokens are decoded together with those shortly before them, since a token alone may be a part of a
    character, and some tokenizers drop the space before a first word. Text that may be the beginning of a
    stop sequence is held back until the next tokens show whether it is.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._start = self._read = 0
        """The tokens that are decoded begin at the first of these; those before the second were returned."""
        self._held = ""
        self.is_stopped = False
        """Whether a stop sequence has come."""

    def add(self, token: int) -> str:
        """The text that is certain once this token is known; often empty."""
        self._tokens.append(token)
        before = self._decoded(self._start, self._read)
        text = self._decoded(self._start, len(self._tokens))
        is_unfinished = text.endswith(_UNFINISHED) and len(self._tokens) - self._read < _CHARACTER_TOKENS
        if len(text) <= len(before) and len(self._tokens) - self._read > _MOST_WITHOUT_TEXT:
            del self._tokens[self._read : -_CHARACTER_TOKENS]  # they need not be decoded again and again
            return ""
        if len(text) <= len(before) or is_unfinished:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._released(text[len(before) :])

    def end(self) -> str:
        """The rest of the text, once no token follows."""
        before = self._decoded(self._start, self._read)
        rest = self._decoded(self._start, len(self._tokens))[len(before) :]
        self._start = self._read = len(self._tokens)
        text = self._released(rest) if rest else ""
        held, self._held = self._held, ""
        return text if self.is_stopped else text + held

    def _decoded(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True))

    def _released(self, added: str) -> str:
        """Text up to the first stop sequence, or up to what may be the beginning of one."""
        text, self._held = self._held + added, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the first of a stop sequence."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
