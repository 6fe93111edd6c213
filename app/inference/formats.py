"""Puts the parts of an answer into OpenAI's shapes: as a whole, or as the chunks of a stream."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.contract.inference import Alternative, AnswerPart, ChoiceDelta, FinishReason, TokenLogprob, Usage
from app.inference.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    TopLogprob,
    UsageResponse,
)


@dataclass
class _Choice:
    """What was received of a choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason = "stop"


class AnswerFormat(Protocol):
    """How an answer is sent."""

    def whole(self, parts: Sequence[AnswerPart]) -> ChatCompletion | CompletionResponse:
        """The answer, of all of its parts."""

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        """The chunks of a stream for one part."""


class _Format:
    def __init__(self, request_id: str, prefix: str, model: str, *, with_usage: bool) -> None:
        self._id = f"{prefix}-{request_id.partition('-')[2]}"
        self._created, self._model = int(time.time()), model
        self._with_usage = with_usage

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

    def whole(self, parts: Sequence[AnswerPart]) -> ChatCompletion:
        choices, usage = _collected(parts)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content="".join(choice.texts)),
                    logprobs=None if choice.logprobs is None else _chat_logprobs(choice.logprobs),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in sorted(choices.items())
            ],
            usage=_usage(usage),
        )

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
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs).model_dump(),
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

    def whole(self, parts: Sequence[AnswerPart]) -> CompletionResponse:
        choices, usage = _collected(parts)
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                CompletionChoice(
                    index=index,
                    text="".join(choice.texts),
                    logprobs=None if choice.logprobs is None else _logprobs(choice.logprobs, 0),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in sorted(choices.items())
            ],
            usage=_usage(usage),
        )

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
                choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
            choice.finish_reason = delta.finish_reason or choice.finish_reason
    return choices, usage


def _usage(usage: Usage) -> UsageResponse:
    return UsageResponse(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(**_alternative(each), top_logprobs=[_top(other) for other in each.top])
            for each in tokens
        ]
    )


def _top(each: Alternative) -> TopLogprob:
    return TopLogprob(**_alternative(each))


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
    offsets = []
    for each in tokens:
        offsets.append(start)
        start += len(each.token)
    return CompletionLogprobs(
        tokens=[_name(each) for each in tokens],
        token_logprobs=[each.logprob for each in tokens],
        top_logprobs=[{_name(other): other.logprob for other in each.top} for each in tokens],
        text_offset=offsets,
    )
