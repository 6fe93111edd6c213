"""Puts the parts of an answer into OpenAI's shapes: as a whole, or as the chunks of a stream.

A whole answer is written token by token: its log probabilities may be megabytes, and no thread but the one
that serialises an object runs until that object is done.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.contract.inference import Alternative, AnswerPart, ChoiceDelta, FinishReason, TokenLogprob, Usage
from app.inference.schemas import CompletionChoice, CompletionLogprobs, UsageResponse


@dataclass
class _Choice:
    """What was received of a choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason = "stop"


class AnswerFormat(Protocol):
    """How an answer is sent."""

    def whole(self, parts: Sequence[AnswerPart]) -> bytes:
        """The answer as JSON, of all of its parts: a `ChatCompletion` or a `CompletionResponse`. Takes
        seconds if it has the log probabilities of many tokens."""

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        """The chunks of a stream for one part."""


class _Format:
    def __init__(self, request_id: str, prefix: str, model: str, *, with_usage: bool) -> None:
        self._id = f"{prefix}-{request_id.partition('-')[2]}"
        self._created, self._model = int(time.time()), model
        self._with_usage = with_usage

    def _whole(self, kind: str, parts: Sequence[AnswerPart], written: Callable[[int, _Choice], str]) -> bytes:
        """The answer.

        Args:
            written: writes a choice as JSON, given its index.
        """
        choices, usage = _collected(parts)
        found = [written(index, choice) for index, choice in sorted(choices.items())]
        of_answer = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "usage": _usage(usage).model_dump(),
            "system_fingerprint": None,
        }
        return _with_member(of_answer, "choices", f"[{', '.join(found)}]").encode()

    def _chunk(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        made = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._with_usage:
            made["usage"] = None if usage is None else _usage(usage).model_dump()
        return made


class ChatFormat(_Format):
    """The shapes of `POST /v1/chat/completions`."""

    def __init__(self, request_id: str, model: str, *, with_usage: bool) -> None:
        super().__init__(request_id, "chatcmpl", model, with_usage=with_usage)
        self._begun: set[int] = set()

    def whole(self, parts: Sequence[AnswerPart]) -> bytes:
        return self._whole("chat.completion", parts, self._written)

    def _written(self, index: int, choice: _Choice) -> str:
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        of_choice = {"index": index, "message": message, "finish_reason": choice.finish_reason}
        if choice.logprobs is None:
            return _with_member(of_choice, "logprobs", "null")
        content = _json_list(_chat_logprob(each) for each in choice.logprobs)
        return _with_member(of_choice, "logprobs", _with_member({"refusal": None}, "content", content))

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        for delta in part.deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                yield self._of(delta.index, {"role": "assistant", "content": "", "refusal": None})
            if delta.text or delta.logprobs:
                yield self._of(delta.index, {"content": delta.text}, delta)
            if delta.finish_reason is not None:
                yield self._of(delta.index, {}, finish_reason=delta.finish_reason)
        if part.usage is not None and self._with_usage:
            yield self._chunk(_CHAT_CHUNK, [], part.usage)

    def _of(
        self,
        index: int,
        added: dict[str, Any],
        delta: ChoiceDelta | None = None,
        finish_reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        logprobs = delta.logprobs if delta is not None else None
        choice = {
            "index": index,
            "delta": added,
            "logprobs": None
            if logprobs is None
            else {"content": [_chat_logprob(each) for each in logprobs], "refusal": None},
            "finish_reason": finish_reason,
        }
        return self._chunk(_CHAT_CHUNK, [choice])


_CHAT_CHUNK = "chat.completion.chunk"


class CompletionFormat(_Format):
    """The shapes of `POST /v1/completions`."""

    def __init__(self, request_id: str, model: str, *, with_usage: bool) -> None:
        super().__init__(request_id, "cmpl", model, with_usage=with_usage)
        self._lengths: dict[int, int] = {}
        """The characters of each choice that were sent."""

    def whole(self, parts: Sequence[AnswerPart]) -> bytes:
        return self._whole("text_completion", parts, self._written)

    def _written(self, index: int, choice: _Choice) -> str:
        of_choice = {"index": index, "text": "".join(choice.texts), "finish_reason": choice.finish_reason}
        if choice.logprobs is None:
            return _with_member(of_choice, "logprobs", "null")
        tokens = choice.logprobs
        lists = {
            "tokens": (_name(each) for each in tokens),
            "token_logprobs": (each.logprob for each in tokens),
            "top_logprobs": (_top(each) for each in tokens),
            "text_offset": _offsets(tokens, 0),
        }
        members = (f"{json.dumps(name)}: {_json_list(each)}" for name, each in lists.items())
        return _with_member(of_choice, "logprobs", f"{{{', '.join(members)}}}")

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        for delta in part.deltas:
            before = self._lengths.get(delta.index, 0)
            self._lengths[delta.index] = before + len(delta.text)
            choice = CompletionChoice(
                index=delta.index,
                text=delta.text,
                logprobs=None if delta.logprobs is None else _logprobs(delta.logprobs, before),
                finish_reason=delta.finish_reason,
            )
            yield self._chunk("text_completion", [choice.model_dump()])
        if part.usage is not None and self._with_usage:
            yield self._chunk("text_completion", [], part.usage)


def _collected(parts: Sequence[AnswerPart]) -> tuple[dict[int, _Choice], Usage]:
    choices: dict[int, _Choice] = {}
    usage = Usage(prompt_tokens=0, completion_tokens=0)
    for part in parts:
        usage = part.usage or usage
        for delta in part.deltas:
            choice = choices.setdefault(delta.index, _Choice())
            choice.texts.append(delta.text)
            if delta.logprobs is not None:
                choice.logprobs = choice.logprobs or []
                choice.logprobs.extend(delta.logprobs)
            choice.finish_reason = delta.finish_reason or choice.finish_reason
    return choices, usage


def _usage(usage: Usage) -> UsageResponse:
    return UsageResponse(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _with_member(others: dict[str, Any], name: str, value: str) -> str:
    """A JSON object of other members and one more, whose value is JSON already.

    >>> _with_member({"index": 0}, "logprobs", "null")
    '{"index": 0, "logprobs": null}'
    """
    return f"{json.dumps(others, ensure_ascii=False)[:-1]}, {json.dumps(name)}: {value}}}"


def _json_list(values: Iterable[Any]) -> str:
    """A JSON list, serialised one value at a time."""
    return f"[{', '.join(json.dumps(value, ensure_ascii=False) for value in values)}]"


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token in the shape of `ChatTokenLogprob`."""
    return {**_alternative(token), "top_logprobs": [_alternative(each) for each in token.top]}


def _alternative(each: Alternative) -> dict[str, Any]:
    return {"token": each.token, "bytes": list(each.bytes), "logprob": each.logprob}


def _name(each: Alternative) -> str:
    """A token's text; a part of a character is named by its bytes, as OpenAI does."""
    if "\N{REPLACEMENT CHARACTER}" not in each.token:
        return each.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in each.bytes)


def _logprobs(tokens: Sequence[TokenLogprob], start: int) -> CompletionLogprobs:
    """The older shape of log probabilities.

    Args:
        start: the characters of the choice before these tokens.
    """
    return CompletionLogprobs(
        tokens=[_name(each) for each in tokens],
        token_logprobs=[each.logprob for each in tokens],
        top_logprobs=[_top(each) for each in tokens],
        text_offset=list(_offsets(tokens, start)),
    )


def _top(token: TokenLogprob) -> dict[str, float]:
    return {_name(each): each.logprob for each in token.top}


def _offsets(tokens: Iterable[TokenLogprob], start: int) -> Iterator[int]:
    """Where each token begins in its choice's text, in characters."""
    for each in tokens:
        yield start
        start += len(each.token)
