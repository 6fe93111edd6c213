"""What the service and a worker's inference process exchange: a request to a model, and the parts of the
answer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.contract.base import Frozen
from app.contract.model_reference import ModelLayer, ModelReference

FinishReason = Literal["stop", "length"]
"""Why a choice ended: at the end of the answer or a stop sequence, or at its maximum of tokens."""

DEFAULT_CHAT_TOKENS = 1024
"""The maximum number of tokens of a chat's answer if the request does not say."""

DEFAULT_COMPLETION_TOKENS = 16
"""The same for a completion, as in OpenAI's API."""


class SamplingOptions(Frozen):
    """How tokens are chosen. None: as the model's generation_config.json says, or else without effect."""

    temperature: float | None = None
    """0: always the most probable token."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int | None = None


class InferenceOrder(Frozen):
    """What a model is asked: a conversation, or prompts to complete."""

    model: ModelReference
    messages: tuple[dict[str, Any], ...] | None = None
    """A conversation for the model's chat template; None for prompts."""
    tools: tuple[dict[str, Any], ...] | None = None
    """The functions that the assistant may call, as JSON schemas; the template describes them."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or tokens, to be completed."""
    choices: int = 1
    """The number of answers to each prompt."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """For each token, the log probabilities of this many of the most probable tokens are returned, too; None:
    no log probabilities at all."""
    streams: bool = False
    """Whether parts of the answer are sent while it is made, or only the whole."""
    echo: bool = False
    """Whether an answer begins with its prompt."""
    sampling: SamplingOptions = SamplingOptions()

    def adapter(self) -> ModelLayer | None:
        """The adapters that are added to the model while it answers; None if it has none, or merged ones."""
        return self.model.continued_adapters(adapters=True)

    def without_adapter(self) -> ModelReference:
        """The model without those adapters: models that differ only in them are loaded once."""
        if self.adapter() is None:
            return self.model
        layers = self.model.layers[:-1]
        name = layers[-1].name if layers else self.model.base_name
        return self.model.model_copy(
            update={"name": name, "base": self.model.base_name if layers else None, "layers": layers}
        )


class Alternative(Frozen):
    """A token that the model could have chosen."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class TokenLogprob(Alternative):
    """A chosen token, with the most probable ones at its place. Log probabilities are those of the model,
    before temperature and penalties."""

    top: tuple[Alternative, ...] = ()


class ChoiceDelta(Frozen):
    """What was added to one choice."""

    index: int
    text: str = ""
    logprobs: Annotated[tuple[TokenLogprob, ...], Field(fail_fast=True)] | None = None
    finish_reason: FinishReason | None = None
    """Set with the last part of the choice."""


class InferenceError(Frozen):
    """Why there is no answer."""

    status: int
    """As in HTTP."""
    code: str
    message: str
    field: str | None = None


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int


class AnswerPart(Frozen):
    """A part of an answer, in the order in which the parts are sent."""

    deltas: Annotated[tuple[ChoiceDelta, ...], Field(fail_fast=True)] = ()
    usage: Usage | None = None
    """With the last part of an answer."""
    error: InferenceError | None = None
    """Instead of the rest of the answer."""

    @property
    def is_last(self) -> bool:
        return self.usage is not None or self.error is not None
