"""Chat completions and completions in OpenAI's shape, as its clients send and expect them.

Source: https://platform.openai.com/docs/api-reference/chat, and the types of openai 3.52. `top_k`, `min_p`
and `repetition_penalty` are named as in vLLM and transformers; clients send them through `extra_body`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from app.contract.base import Flag, Request, ResponseModel, ShortText
from app.contract.data_formats import Role
from app.contract.inference import FinishReason, SamplingOptions
from app.contract.row_shapes import REASONING

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_ANSWERS = 128
"""The maximum number of prompts times answers to each."""
MAX_TOKENS = 1_000_000
MAX_ALTERNATIVES = 20

Text = Annotated[str, StringConstraints(max_length=2**23)]
"""A long text, such as a prompt; a body has a maximum size, too."""
Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Bias = Annotated[float, Field(ge=-100, le=100)]


def _one_if_null(given: Any) -> Any:
    return 1 if given is None else given


class StreamOptions(Request):
    include_usage: Flag | None = Field(None, description="Send the usage before the end of the stream")
    include_obfuscation: Flag | None = Field(None, description="Ignored")


class _InferenceRequest(Request):
    """What both kinds of request have in common."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=400)] = Field(
        description="A base model, a trained one, or a job's checkpoint"
    )
    n: Annotated[int, BeforeValidator(_one_if_null)] = Field(
        1, ge=1, le=MAX_CHOICES, description="Answers to each prompt; null: 1"
    )
    stream: Flag | None = Field(None, description="Send the answer as server-sent events while it is written")
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = Field(
        None, description="Texts at which an answer ends; they are not part of it"
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="0: always the most probable token. Default: the model's own, or 1"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Choose among the likeliest tokens that have this probability together"
    )
    top_k: int | None = Field(None, ge=0, le=1_000_000, description="0: no limit")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[Annotated[int, Field(ge=0)], _Bias], Field(max_length=1000)] | None = None
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same request draws the same tokens, up to rounding"
    )
    user: Annotated[str, StringConstraints(max_length=500)] | None = Field(None, description="Ignored")

    def sampling(self) -> SamplingOptions:
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
        )

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _has_stream_options_only_for_streams(self) -> "_InferenceRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class TextPart(Request):
    type: Literal["text"]
    text: Text


class FunctionDefinition(Request):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: Flag | None = Field(None, description="Ignored")


class Tool(Request):
    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(Request):
    name: Annotated[str, StringConstraints(max_length=200)]
    arguments: Text


class ToolCall(Request):
    id: Annotated[str, StringConstraints(max_length=200)]
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Request):
    role: Role
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, StringConstraints(max_length=200)] | None = None
    reasoning_content: Text | None = Field(None, description="Also called reasoning, or thinking")
    refusal: Text | None = Field(None, description="Ignored")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Ignored")
    audio: None = Field(None, description="Ignored")
    function_call: None = Field(None, description="Ignored")
    tool_calls: Annotated[list[ToolCall], Field(max_length=100, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=200)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_reasoning(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if name not in REASONING}
        values = (given.get(name) for name in ("reasoning_content", *REASONING))
        reasoning = next((value for value in values if value is not None), None)
        return found if reasoning is None else {**found, "reasoning_content": reasoning}

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of a tool needs the tool_call_id that it answers")
        return self

    def for_template(self) -> dict[str, Any]:
        """What a chat template receives."""
        text = self.content if isinstance(self.content, str) else _joined(self.content or [])
        given = self.model_dump(include={"role", "name", "reasoning_content", "tool_calls", "tool_call_id"})
        return {name: value for name, value in {**given, "content": text}.items() if value is not None}


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


class TextFormat(Request):
    type: Literal["text"]


class ChatRequest(_InferenceRequest):
    """A conversation that the model is to continue."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Older name of max_completion_tokens"
    )
    logprobs: Flag | None = Field(None, description="Return the log probability of each token")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="Also those of this many most probable tokens"
    )
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = Field(
        None, description="Functions, which the model's chat template describes to it"
    )
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Flag | None = Field(None, description="Ignored")
    response_format: TextFormat | None = None
    metadata: dict[ShortText, Text] | None = Field(None, max_length=16, description="Ignored")
    store: Literal[False] | None = Field(None, description="Nothing is stored")

    @model_validator(mode="after")
    def _agrees(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self


Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]


class CompletionRequest(_InferenceRequest):
    """Texts that the model is to continue."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, several texts, or their tokens")
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="Default: 16")
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: Flag | None = Field(None, description="Begin each answer with its prompt")
    best_of: Literal[1] | None = None
    suffix: None = Field(None, description="Not supported")

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_not_empty(cls, value: Any) -> Any:
        if value in ("", [], [""], [[]]):
            raise ValueError("is empty")
        return value

    @model_validator(mode="after")
    def _asks_for_few(self) -> "CompletionRequest":
        if len(self.prompts()) * self.n > MAX_ANSWERS:
            raise ValueError(f"the number of prompts times n must be at most {MAX_ANSWERS}")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs cannot be combined with echo: those of a prompt are not computed")
        return self

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        given: Any = self.prompt
        if isinstance(given, str):
            return (given,)
        if isinstance(given[0], int):
            return (tuple(given),)
        return tuple(each if isinstance(each, str) else tuple(each) for each in given)


class TopLogprob(ResponseModel):
    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob] | None
    refusal: None = None


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class UsageResponse(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(ResponseModel):
    """An answer to a conversation. A stream sends objects of the type `chat.completion.chunk` instead, whose
    choices have a `delta`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageResponse
    system_fingerprint: None = None


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int = Field(description="n * p + a for answer a to prompt p, all counted from 0")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class CompletionResponse(ResponseModel):
    """Completions of one or more prompts. A stream sends objects of the same type, with the text that was
    added."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageResponse | None = None
    system_fingerprint: None = None
