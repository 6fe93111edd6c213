"""Turns examples into tokens, and marks those that count for the loss."""

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from app.contract.data_formats import (
    Chat,
    Example,
    Message,
    PromptCompletion,
    SingleExample,
    TextExample,
    sequences_of,
)
from workers.training.data.piece_boundaries import encode_continued, marks_beginnings
from workers.training.data.rendering import Conversation, NotRendered, Renderer
from workers.training.exceptions import CannotTrain
from workers.training.processes.limits import limited_memory

Piece = tuple[str, bool]
"""A stretch of text, and whether its tokens count for the loss."""

EncodedSequence = tuple[list[int], list[bool]]
"""A sequence's tokens, and which of them count for the loss."""

_TOKENISER_BYTES = 2 * 2**30
_TOKENISER_BYTES_PER_CHARACTER = 4096
"""How much memory a tokenizer may take: a hostile one could turn a letter into gigabytes."""
_CHARACTERS = 2**18
"""About how many characters are tokenised at once; an example is never divided."""


class ExampleEncoder:
    """Turns examples into tokens piece by piece, split where the loss begins or ends.

    At inference, a prompt is tokenised without its completion; the same is done here. Some tokenizers treat
    the beginning of a text differently (SentencePiece's put a space in front of it): with these, a piece is
    tokenised as the continuation of what is before it (`piece_boundaries.py`).

    Args:
        classifies: whether texts are to be classified: they get only the special tokens that the tokenizer
            itself adds, since whoever uses the classifier will tokenise texts so.
    """

    def __init__(self, tokenizer: Any, *, classifies: bool = False) -> None:
        self._tokenizer = tokenizer
        self._classifies = classifies
        with limited_memory(_TOKENISER_BYTES):
            self._start, self._after = tokens_around(tokenizer)
            self._marks_beginnings = marks_beginnings(tokenizer)
        if tokenizer.eos_token_id is None:
            raise CannotTrain(
                "no_end_token",
                "the model's tokenizer has no end-of-sequence token: set "
                "eos_token in its tokenizer_config.json",
            )
        self._end = [int(tokenizer.eos_token_id)]
        self._renderers: dict[str, Renderer] = {}
        self._last_noted: int | None = None
        self.last_answers_only = 0
        """Chats of which only the last answer is learned, because of the chat template."""
        self._without_tool_calls: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for renderer in self._renderers.values():
            renderer.close()

    @property
    def without_tool_calls(self) -> int:
        """Lines with chats whose tool calls the chat template leaves out."""
        return len(self._without_tool_calls)

    def samples(self, chunk: list[tuple[int, Example]]) -> Iterator[tuple[int, list[EncodedSequence]]]:
        """Yields each example's line number and its sequences: one, or those of both answers of a pair."""
        own = [(number, sequences_of(example)) for number, example in chunk]
        encoded = self._rows([(number, each) for number, sequences in own for each in sequences])
        for number, sequences in own:
            yield number, list(itertools.islice(encoded, len(sequences)))

    def _rows(self, chunk: list[tuple[int, SingleExample]]) -> Iterator[EncodedSequence]:
        rendered = iter(self._rendered([(line, each) for line, each in chunk if isinstance(each, Chat)]))
        pieces = [
            self._turns(number, *next(rendered)) if isinstance(example, Chat) else _pieces(example)
            for number, example in chunk
        ]
        encoded = self._encoded([[text for text, _ in example] for example in pieces])
        for (_, example), own in zip(chunk, pieces, strict=True):
            tokens: list[int] = []
            counts: list[bool] = []
            for _, counted in own:
                piece = next(encoded)
                tokens += piece
                counts += [counted] * len(piece)
            if self._classifies:
                tokens = [*self._start, *tokens, *self._after]
                counts = [True] * len(tokens)
                if not tokens:  # there is nothing to classify
                    tokens, counts = self._end, [False]
            elif not isinstance(example, Chat):
                tokens, counts = self._begun_and_ended(tokens, counts)
            yield tokens, counts

    def _turns(self, number: int, whole: str, parts: list[str]) -> list[Piece]:
        """The pieces of a rendered chat.

        Some templates render a turn differently once others follow: they leave out the reasoning of earlier
        answers, for example. Then only the last turn is learned, which `last_answers_only` counts.

        Args:
            parts: for each turn to be learned, the text before it and the text to its end.
        """
        turns = list(zip(parts[::2], parts[1::2], strict=True))
        if all(whole.startswith(before) and whole.startswith(upto) for before, upto in turns):
            return _all_turns(whole, turns)
        pieces = _last_turn(number, *turns[-1])
        if len(turns) > 1 and number != self._last_noted:  # the answers of a pair are in one line
            self.last_answers_only += 1
            self._last_noted = number
        return pieces

    def _begun_and_ended(self, tokens: list[int], counts: list[bool]) -> tuple[list[int], list[bool]]:
        """Tokens between those that begin and end every text; a text that has them already keeps its own."""
        begun = len(self._start) if tokens[: len(self._start)] == self._start else 0
        ended = tokens[begun:][-1:] == self._end and counts[-1]  # not that of a prompt without a completion
        inner = slice(begun, len(tokens) - ended)
        return (
            [*self._start, *tokens[inner], *self._end],
            [*[False] * len(self._start), *counts[inner], True],
        )

    def _encoded(self, examples: list[list[str]]) -> Iterator[list[int]]:
        """The tokens of each piece of each example, one example after the other."""
        own: list[list[str]] = []
        characters = 0
        for example in examples:
            own.append(example)
            characters += sum(map(len, example))
            if characters > _CHARACTERS:
                yield from self._encoded_at_once(own, characters)
                own, characters = [], 0
        yield from self._encoded_at_once(own, characters)

    def _encoded_at_once(self, examples: list[list[str]], characters: int) -> list[list[int]]:
        texts = [text for example in examples for text in example]
        most = _TOKENISER_BYTES + _TOKENISER_BYTES_PER_CHARACTER * characters
        if not texts:
            return []
        try:
            with limited_memory(most):
                if self._marks_beginnings:
                    return encode_continued(self._tokenizer, examples)
                encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False).input_ids
                return encoded
        except MemoryError:
            raise CannotTrain(
                "data_not_tokenised",
                f"the model's tokenizer takes more than {most // 2**20} MiB for {characters} characters",
            ) from None

    def _rendered(self, chats: list[tuple[int, Chat]]) -> list[tuple[str, list[str]]]:
        """Each chat as a whole; and for each turn to be learned, the text before it and the text to its
        end."""
        if not chats:
            return []
        if not self._tokenizer.chat_template:
            raise CannotTrain(
                "no_chat_template",
                "the model's tokenizer has no chat template: use prompt and completion, or text, or a "
                "model made for chats",
            )
        of_template: dict[str, list[int]] = {}
        for number, (_, chat) in enumerate(chats):
            of_template.setdefault(self._template(chat), []).append(number)
        made: list[list[str]] = [[] for _ in chats]
        for template, numbers in of_template.items():
            rendered = self._render(template, [chats[number] for number in numbers])
            for number, texts in zip(numbers, rendered, strict=True):
                made[number] = texts
        for (number, chat), texts in zip(chats, made, strict=True):
            if _loses_calls(chat, *texts):
                self._without_tool_calls.add(number)
            if chat.messages[0].role == "assistant" and chat.messages[0].weight:
                texts[1] = _opening_within(*texts[1:3])
        return [(whole, parts) for whole, *parts in made]

    def _template(self, chat: Chat) -> str:
        """The chat template for a chat, as transformers chooses it: a model may have one for tools.

        Raises:
            CannotTrain: it has several, but none for a chat like this.
        """
        try:
            template: str = self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise CannotTrain(
                "no_chat_template",
                f"the model's tokenizer has the chat templates {names}, and none named default: use prompt "
                "and completion, or text, or another model",
            ) from None
        return template

    def _render(self, template: str, chats: list[tuple[int, Chat]]) -> list[list[str]]:
        """The texts of chats of one template, each for its `_prefixes`."""
        if template not in self._renderers:
            self._renderers[template] = Renderer(template, self._tokenizer.special_tokens_map)
        conversations = [
            Conversation([message.for_template() for message in chat.messages], _prefixes(chat), chat.tools)
            for _, chat in chats
        ]
        try:
            return self._renderers[template].render(conversations)
        except NotRendered as error:
            line = chats[error.number][0]
            raise CannotTrain("chat_template", f"line {line} of the data: {error}") from None


_MOST_TRIED = 100
"""How many texts are tried to find the special tokens before one: a vocabulary may lack most characters."""


def tokens_before(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text: often the one that begins a sequence."""
    return tokens_around(tokenizer)[0]


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before a text, and after it."""
    special = set(tokenizer.all_special_ids)
    known = (tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special)
    for text in itertools.chain(("x", "1", "."), itertools.islice(known, _MOST_TRIED)):
        whole: list[int] = tokenizer(text).input_ids
        plain: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        for start in range(len(whole) - len(plain) + 1 if plain else 0):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("").input_ids[:1] == [bos] else [], []


def _pieces(example: TextExample | PromptCompletion) -> list[Piece]:
    if isinstance(example, TextExample):
        return [(example.text, True)]
    return [(example.prompt, False), (example.completion, True)]


def _loses_calls(chat: Chat, whole: str, *parts: str) -> bool:
    """Whether the template leaves out a call: then its function's name is missing in the turn that makes it.

    Args:
        parts: for each turn to be learned, the text before it and the text to its end.
    """
    learned = zip(parts[::2], parts[1::2], strict=True)
    for message in chat.messages:
        rendered = whole
        if message.role == "assistant" and message.weight:
            before, upto = next(learned)
            rendered = upto.removeprefix(before)
        if not all(name in rendered for name in _called(message)):
            return True
    return False


def _called(message: Message) -> set[str]:
    """The names of the functions that the assistant calls in a message."""
    functions = [call.get("function", call) for call in message.tool_calls or ()]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return {name for name in names if isinstance(name, str)}


def _prefixes(chat: Chat) -> list[tuple[int, bool]]:
    """The prefixes of a chat to render. The first is the whole chat. Each turn to be learned adds two: the
    messages before it, with the opening of an answer; and the messages up to its end.

    There are no messages before a chat's first turn, and templates may not render none. So for a first turn,
    the opening is rendered after the turn instead (`_opening_within` finds it in the turn).
    """
    found = [(len(chat.messages), False)]
    for index, message in enumerate(chat.messages):
        if message.role == "assistant" and message.weight:
            found += [(max(index, 1), True), (index + 1, False)]
    return found


def _opening_within(opened: str, turn: str) -> str:
    """The beginning of a chat's first turn, to the end of its opening; empty if the opening is not in it.

    Args:
        opened: the turn, followed by the opening of another answer.
    """
    opening = opened.removeprefix(turn)
    at = turn.find(opening) if opened.startswith(turn) and opening else -1
    return turn[: at + len(opening)] if at >= 0 else ""


def _all_turns(whole: str, turns: list[tuple[str, str]]) -> list[Piece]:
    """Splits the rendered chat into pieces; of an assistant's turn, everything after its opening counts."""
    pieces: list[Piece] = []
    at = 0
    for before, upto in turns:
        pieces += [(whole[at : len(before)], False), (whole[len(before) : len(upto)], True)]
        at = len(upto)
    return [*pieces, (whole[at:], False)]


def _last_turn(number: int, before: str, upto: str) -> list[Piece]:
    """The last turn to be learned, after exactly the text that is before it at inference.

    Raises:
        CannotTrain: the chat template renders that text differently once the turn follows.
    """
    if not upto.startswith(before):
        raise CannotTrain(
            "chat_template",
            f"line {number} of the data: the model's chat template renders the messages before an answer "
            "differently once the answer follows (some leave out a system message then), so it is unclear "
            "which tokens to learn: put the system message into the user's first message, or use prompt and "
            "completion",
        )
    return [(before, False), (upto[len(before) :], True)]
