"""One choice of an answer while it is being made: its tokens, its text, and when it ends."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from app.contract.inference import Alternative, ChoiceDelta, FinishReason, TokenLogprob
from workers.inference.sampling import Sampling
from workers.inference.text_stream import TextStream


@dataclass(eq=False)
class Choice:
    """A prompt and the tokens that were made for it."""

    request_id: str
    index: int
    """The number of the choice within the request's answer."""
    prompt: list[int]
    max_tokens: int
    ends: Collection[int]
    """The tokens that end an answer; they are not part of its text."""
    sampling: Sampling
    text: TextStream
    tokenizer: Any
    source: torch.Generator
    logprobs: int | None = None
    """How many alternatives of each token are returned; None: no log probabilities at all."""
    made: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failed_passes: int = 0
    """How many forward passes that it shared with others have failed in a row."""
    _pending: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of tokens whose text is not certain yet."""

    @property
    def longest(self) -> int:
        """The number of tokens that it may reach."""
        return len(self.prompt) + self.max_tokens

    def next_token(self, logits: Tensor) -> int:
        """Chooses the next token.

        Args:
            logits: those of its last position, of shape [vocabulary].
        """
        return self.sampling.choose(logits, self.prompt, self.made, self.source)

    def take(self, token: int, logits: Tensor) -> ChoiceDelta | None:
        """Adds a token. Returns what it adds to the answer, or None if that is not certain yet.

        Args:
            logits: from which the token was chosen.
        """
        self.made.append(token)
        if token in self.ends:
            self.finish_reason = "stop"
            return self._delta(self.text.end())
        if self.logprobs is not None:
            self._pending.append(_logprob(token, logits, self.logprobs, self.tokenizer))
        text = self.text.add(token)
        if self.text.is_stopped:
            self.finish_reason = "stop"
        elif len(self.made) >= self.max_tokens:
            text += self.text.end()
            self.finish_reason = "stop" if self.text.is_stopped else "length"
        return self._delta(text) if text or self.finish_reason is not None else None

    def _delta(self, text: str) -> ChoiceDelta:
        logprobs, self._pending = tuple(self._pending), []
        return ChoiceDelta(
            index=self.index,
            text=text,
            logprobs=logprobs if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
        )


def _logprob(token: int, logits: Tensor, count: int, tokenizer: Any) -> TokenLogprob:
    values = torch.log_softmax(logits, dim=-1)
    top = torch.topk(values, min(count, len(values)))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(
        **_named(token, float(values[token]), tokenizer),
        top=tuple(Alternative(**_named(each, value, tokenizer)) for each, value in alternatives),
    )


_LEAST = -9999.0
"""In place of minus infinity, which is not a number in JSON."""


def _named(token: int, value: float, tokenizer: Any) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    return {"token": text, "bytes": tuple(_bytes(token, text, tokenizer)), "logprob": max(_LEAST, value)}


_AS_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes(token: int, text: str, tokenizer: Any) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if (found := _AS_BYTE.fullmatch(name)) is not None:  # as in SentencePiece's vocabularies
        return bytes([int(found[1], 16)])
    letters = _bytes_by_letter()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return text.encode()


@cache
def _bytes_by_letter() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies (Radford et al. 2019)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
