"""Chat completions and completions, on the OpenAI-compatible surface."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from anyio import CancelScope, to_thread
from fastapi import Request, Response
from fastapi.sse import format_sse_event
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.contract.inference import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    AnswerPart,
    InferenceError,
    InferenceOrder,
)
from app.contract.model_reference import ModelReference, StartingModel
from app.errors import (
    AccrueError,
    ContextTooLong,
    InvalidRequest,
    ModelFailed,
    NoChatTemplate,
    Unavailable,
    UnknownModel,
    Unprocessable,
)
from app.inference import requests
from app.inference.answers import KEEPALIVE_SECONDS, AnswerReader
from app.inference.formats import AnswerFormat, ChatFormat, CompletionFormat
from app.inference.schemas import ChatCompletion, ChatRequest, CompletionRequest, CompletionResponse
from app.models import starting_models
from app.security.authentication import Authenticate
from app.settings import Settings
from app.storage.database import Database
from app.web.concurrency import ConcurrencyLimit, SlowWork
from app.web.dependencies import CurrentDatabase, CurrentSettings, Slowly, in_thread
from app.web.routers import openai_router

log = structlog.get_logger("accrue.service")

router = openai_router("/v1", tags=["OpenAI: inference"])

MAX_PER_KEY = 64
"""The maximum number of requests of one key whose answer is awaited at the same time."""
MAX_TOTAL = 256

_NAMES = TypeAdapter(StartingModel)

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "The answer; or, with stream: true, its chunks",
    }
}


@router.post(
    "/chat/completions", summary="Answer a conversation", response_model=ChatCompletion, responses=_STREAM
)
async def chat(
    request: Request,
    requested: ChatRequest,
    database: CurrentDatabase,
    settings: CurrentSettings,
    slowly: Slowly,
) -> Response:
    """The conversation is rendered with the model's chat template, as for its training. Nothing of it is kept
    once the answer is sent."""

    def order() -> InferenceOrder:
        most = requested.max_completion_tokens or requested.max_tokens
        return InferenceOrder(
            model=_model(requested.model, database, settings),
            messages=tuple(message.for_template() for message in requested.messages),
            tools=_tools(requested),
            choices=requested.n,
            max_tokens=most or DEFAULT_CHAT_TOKENS,
            stop=requested.stops(),
            logprobs=(requested.top_logprobs or 0) if requested.logprobs else None,
            sampling=requested.sampling(),
            streams=bool(requested.stream),
        )

    shape = partial(ChatFormat, model=requested.model, with_usage=requested.includes_usage)
    return await _answer(request, database, await slowly(order), shape)


@router.post("/completions", summary="Complete texts", response_model=CompletionResponse, responses=_STREAM)
async def complete(
    request: Request,
    requested: CompletionRequest,
    database: CurrentDatabase,
    settings: CurrentSettings,
    slowly: Slowly,
) -> Response:
    """Prompts are tokenized as in training, without the chat template."""

    def order() -> InferenceOrder:
        return InferenceOrder(
            model=_model(requested.model, database, settings),
            prompts=requested.prompts(),
            choices=requested.n,
            max_tokens=DEFAULT_COMPLETION_TOKENS if requested.max_tokens is None else requested.max_tokens,
            stop=requested.stops(),
            logprobs=requested.logprobs,
            echo=bool(requested.echo),
            sampling=requested.sampling(),
            streams=bool(requested.stream),
        )

    shape = partial(CompletionFormat, model=requested.model, with_usage=requested.includes_usage)
    return await _answer(request, database, await slowly(order), shape)


def _model(name: str, database: Database, settings: Settings) -> ModelReference:
    """The model of a name.

    Raises:
        UnknownModel: no model has this name, or the name is not well formed.
    """
    try:
        _NAMES.validate_python(name)
    except ValidationError:
        raise UnknownModel(
            "There is no model of this name: give a base model (gpt2, owner/name), or a trained one as GET "
            "/v1/models lists it (ft:…).",
            field="model",
        ) from None
    try:
        model, _ = starting_models.find_model(name, database, settings)
    except Unprocessable as error:
        raise UnknownModel(error.message, field="model") from None
    if model.scores:
        raise InvalidRequest(
            f"{name} scores texts ({', '.join(model.scores)[:200]}) and predicts no tokens, so it cannot "
            "answer: download it, and use it with transformers (docs/classifiers.md).",
            field="model",
        )
    return model


def _tools(requested: ChatRequest) -> tuple[dict[str, Any], ...] | None:
    if requested.tools is None or requested.tool_choice == "none":
        return None
    return tuple(tool.model_dump(exclude_none=True) for tool in requested.tools)


async def _answer(
    request: Request,
    database: Database,
    order: InferenceOrder,
    shape: Callable[[str], AnswerFormat],
) -> Response:
    """Waits for the answer, or for its first part if it is to be streamed: until then, an error has a status
    of its own.

    Raises:
        AccrueError: there is no answer.
    """
    answers: AnswerReader = request.app.state.answers
    limit: ConcurrencyLimit = request.app.state.inference_limit
    key_id = request.state.caller.key_id
    end = limit.acquire(key_id)
    try:
        request_id = await to_thread.run_sync(requests.add, database, order, key_id)
        parts = answers.parts(request_id)
        try:
            form = shape(request_id)
            if order.streams:
                first = await anext(parts)  # None if nothing has come for some seconds: the stream begins
                if first is not None and first.error is not None:
                    raise _as_exception(first.error)
                events = _events(request, form, first, parts)
                return _AnswerStream(
                    events,
                    parts,
                    end,
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                )
            received = [part async for part in _until_left(parts, request)]
            # With log probabilities, an answer may be megabytes. It is made already, so that it does not wait
            # with other slow requests.
            work: SlowWork = request.app.state.answer_work
            run = in_thread if order.logprobs is None else partial(work.run, key_id)
            response = Response(await run(partial(form.whole, received)), media_type="application/json")
        except BaseException:
            await parts.aclose()
            raise
        await parts.aclose()
    except BaseException:
        end()
        raise
    end()
    return response


async def _until_left(
    parts: AsyncIterator[AnswerPart | None], request: Request
) -> AsyncGenerator[AnswerPart]:
    """The parts of an answer, to the last.

    Raises:
        AccrueError: the worker reported an error, or the client has left.
    """
    checked_at = time.monotonic()
    async for part in parts:
        if part is None or time.monotonic() > checked_at + KEEPALIVE_SECONDS:
            checked_at = time.monotonic()
            if await request.is_disconnected():
                raise Unavailable("The client has left.")
        if part is None:
            continue
        if part.error is not None:
            raise _as_exception(part.error)
        yield part
        if part.is_last:
            return


def _as_exception(error: InferenceError) -> AccrueError:
    kinds: tuple[type[AccrueError], ...] = (ContextTooLong, NoChatTemplate, ModelFailed)
    other = Unavailable if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else InvalidRequest
    kind = next((each for each in kinds if each.code == error.code), other)
    return kind(error.message, field=error.field)


async def _events(
    request: Request,
    form: AnswerFormat,
    first: AnswerPart | None,
    parts: AsyncGenerator[AnswerPart | None],
) -> AsyncGenerator[bytes]:
    """Formats an answer as events, until its end, or until the client's key is revoked."""
    authenticate: Authenticate = request.app.state.authenticate
    checked_at = time.monotonic()
    part: AnswerPart | None = first
    async with aclosing(parts):
        while True:
            if part is None:
                yield format_sse_event(comment="still here")
            else:
                for chunk in form.chunks(part):
                    yield format_sse_event(data_str=json.dumps(chunk, ensure_ascii=False))
                if part.error is not None:
                    yield format_sse_event(data_str=json.dumps({"error": _error_body(part.error)}))
                if part.is_last:
                    break
            if time.monotonic() > checked_at + KEEPALIVE_SECONDS:
                checked_at = time.monotonic()
                try:
                    await authenticate(request)
                except AccrueError:
                    return
                except SQLAlchemyError:
                    log.warning("the key of a stream could not be checked again", exc_info=True)
            part = await anext(parts)
    yield format_sse_event(data_str="[DONE]")


def _error_body(error: InferenceError) -> dict[str, Any]:
    is_ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if is_ours else "invalid_request_error"
    return {"message": error.message, "type": kind, "param": error.field, "code": error.code}


class _AnswerStream(StreamingResponse):
    """A streamed answer, whose request is deleted at its end, even if the client disconnected or never read
    any of it."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        parts: AsyncGenerator[AnswerPart | None],
        end: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(events, **options)
        self._events, self._parts, self._end = events, parts, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await self._events.aclose()
                await self._parts.aclose()
            self._end()
