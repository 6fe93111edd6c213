"""Turns requests into the tokens of prompts, as training turns samples into tokens."""

from typing import Any

from app.contract.inference import InferenceOrder
from workers.inference.refusal import refused
from workers.training.data.encoding import tokens_before
from workers.training.data.rendering import Conversation, NotRendered, Renderer
from workers.training.processes.limits import limited_memory

_TOKENIZER_BYTES = 2 * 2**30
_TOKENIZER_BYTES_PER_CHARACTER = 4096
"""How much memory a tokenizer may take, as in training."""

_QUOTED = 100
"""How many characters of a token's text an error quotes."""

_PROBE = [{"role": "user", "content": "1"}]
_ANSWER = "accrue answer 1"
"""An answer that no template contains, to find out how turns end."""


class PromptReader:
    """Reads the prompts of requests with one tokenizer.

    Args:
        context: how many tokens a prompt and its answer may have together.
        vocabulary: how many tokens the model can read; a tokenizer may have more.
    """

    def __init__(self, tokenizer: Any, context: int, vocabulary: int) -> None:
        self._tokenizer, self._context, self._vocabulary = tokenizer, context, vocabulary
        self._renderers: dict[str, Renderer] = {}
        self._start = tokens_before(tokenizer)
        self._turn_ends: tuple[frozenset[int], tuple[str, ...]] | None = None

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()

    def prompts(self, order: InferenceOrder) -> list[list[int]]:
        """The tokens of each prompt.

        Raises:
            Refused: the template cannot render the conversation, or a prompt is too long or empty.
        """
        if order.messages is not None:
            found = [self._tokens(self._rendered(order))]
        else:
            found = [
                self._begun(self._tokens(each)) if isinstance(each, str) else list(each)
                for each in order.prompts
            ]
        for prompt in found:
            if not prompt:
                raise refused("The prompt has no tokens.", field=_field(order))
            self._check_tokens(prompt, order)
            if len(prompt) >= self._context:
                raise refused(
                    f"This model's context has {self._context} tokens, and the prompt has {len(prompt)}: "
                    "shorten it, so that there is room for an answer.",
                    field=_field(order),
                    code="context_length_exceeded",
                )
        return found

    def ends(self, order: InferenceOrder) -> tuple[frozenset[int], tuple[str, ...]]:
        """The tokens and the texts that end an answer, besides those that end every answer: what ends an
        assistant's turn in a conversation."""
        if order.messages is None:
            return frozenset(), ()
        if self._turn_ends is None:
            self._turn_ends = self._found_turn_ends()
        return self._turn_ends

    def _found_turn_ends(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """What the chat template puts after an answer: training teaches it as the answer's end."""
        template = self._tokenizer.chat_template
        if not template:
            return frozenset(), ()
        try:
            conversation = Conversation([*_PROBE, {"role": "assistant", "content": _ANSWER}], [(2, False)])
            [[text]] = self._renderer(self._template(None)).render([conversation])
        except NotRendered:
            return frozenset(), ()
        if _ANSWER not in text:  # the template changes what it is given
            return frozenset(), ()
        after = text.rpartition(_ANSWER)[2]
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {*self._tokenizer.all_special_ids, *(token for token, own in added.items() if own.special)}
        tokens = self._tokens(after) if after else []
        if any(token in special for token in tokens):
            return frozenset([next(token for token in tokens if token in special)]), ()
        return frozenset(), (after.strip(),) if after.strip() else ()

    def _rendered(self, order: InferenceOrder) -> str:
        assert order.messages is not None
        if not self._tokenizer.chat_template:
            raise refused(
                f"{order.model.name} has no chat template: use /v1/completions, or a model made for chats.",
                field="model",
                code="no_chat_template",
            )
        tools = None if order.tools is None else list(order.tools)
        messages = list(order.messages)
        conversation = Conversation(messages, [(len(messages), True)], tools)
        try:
            [[text]] = self._renderer(self._template(tools)).render([conversation])
        except NotRendered as error:
            raise refused(f"{_capitalised(str(error))}.", field="messages") from None
        return text

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        """The template for a conversation, as transformers chooses it: a model may have one for tools."""
        try:
            template: str = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise refused(
                "The model has several chat templates, and none named default.", field="model"
            ) from None
        return template

    def _renderer(self, template: str) -> Renderer:
        if template not in self._renderers:
            self._renderers[template] = Renderer(template, self._tokenizer.special_tokens_map)
        return self._renderers[template]

    def _tokens(self, text: str) -> list[int]:
        most = _TOKENIZER_BYTES + _TOKENIZER_BYTES_PER_CHARACTER * len(text)
        try:
            with limited_memory(most):
                found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        except MemoryError:
            raise refused(
                f"The model's tokenizer takes more than {most // 2**20} MiB for this text."
            ) from None
        return found

    def _begun(self, tokens: list[int]) -> list[int]:
        """A text's tokens after those that begin every text."""
        begins = tokens[: len(self._start)] == self._start
        return tokens if begins else [*self._start, *tokens]

    def _check_tokens(self, prompt: list[int], order: InferenceOrder) -> None:
        """
        Raises:
            Refused: the model cannot read one of the tokens, given as numbers or made by the tokenizer.
        """
        largest = max(prompt)
        if largest < self._vocabulary:
            return
        if largest >= len(self._tokenizer):
            raise refused(
                f"The token {largest} is not in the model's vocabulary: tokens must be smaller than "
                f"{self._vocabulary}.",
                field=_field(order),
            )
        text = str(self._tokenizer.convert_ids_to_tokens(largest))[:_QUOTED]
        raise refused(
            f"The model's tokenizer has the token {largest} ({text}), but the model has only "
            f"{self._vocabulary} embeddings, so it cannot read it: leave it out.",
            field=_field(order),
        )


def _field(order: InferenceOrder) -> str:
    return "prompt" if order.messages is None else "messages"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
