"""One line of training data: text, a prompt with its completion, a chat, a pair of answers, a labelled
answer, or a text of a class; other common shapes become one of these (`row_shapes`).

The service validates uploaded lines with these classes, and the trainer parses the lines with the same
classes: every accepted line can be trained on.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from app.contract.row_shapes import BadShape, canonical
from app.contract.text import MAX_KEY_LENGTH, path_to_unstorable

DataFormat = Literal[
    "text", "prompt_completion", "messages", "preference", "unpaired_preference", "classification"
]
Role = Literal["system", "developer", "user", "assistant", "tool"]


_MIN_WEIGHT = 1e-6


def _check_weight(weight: float) -> float:
    if 0 < weight < _MIN_WEIGHT:
        raise ValueError(f"a weight must be 0 or at least {_MIN_WEIGHT:g}: smaller ones vanish in rounding")
    return weight


Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False), AfterValidator(_check_weight)]


class Line(BaseModel):
    """The fields of every format. Other keys of a line (ids, sources) are ignored, and an event names them
    once (`unused_keys`)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    weight: Weight = 1.0
    """How much each of the line's tokens counts toward the loss, relative to those of other lines."""


class TextExample(Line):
    """Every token of the text counts for the loss."""

    text: str = Field(min_length=1)


_LONGEST_LABEL = 200


def _check_label(label: Any) -> Any:
    if not isinstance(label, bool | int | str):
        raise ValueError("must be text, a whole number, or true or false")
    if label == "":
        raise ValueError("must not be empty")
    if (isinstance(label, int) and abs(label) >= 10**_LONGEST_LABEL) or len(str(label)) > _LONGEST_LABEL:
        raise ValueError(f"must not have more than {_LONGEST_LABEL} characters")
    return label


class ClassifiedText(TextExample):
    """A text of a class."""

    label: Annotated[bool | int | str, PlainValidator(_check_label)]

    @property
    def class_name(self) -> str:
        return str(self.label).lower() if isinstance(self.label, bool) else str(self.label)


class PromptCompletion(Line):
    """Only the completion counts for the loss."""

    prompt: str
    completion: str = Field(min_length=1)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    role: Role
    content: str
    weight: Literal[0, 1] = 1
    """0: an assistant's turn that is only context."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """What a chat template receives."""
        return self.model_dump(include=_FOR_TEMPLATES, exclude_none=True)


_FOR_TEMPLATES = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}


class Chat(Line):
    """Only what the assistant says counts for the loss, its tool calls included, in turns whose weight is
    not 0."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = None
    """The functions that the assistant may call, as JSON schemas; chat templates describe them."""

    @model_validator(mode="after")
    def _has_something_to_learn(self) -> "Chat":
        if not any(message.role == "assistant" and message.weight for message in self.messages):
            raise ValueError("at least one message needs the role assistant and a weight of 1")
        return self


SingleExample = TextExample | PromptCompletion | Chat
"""What becomes one sequence of tokens."""


class PromptPair(Line):
    """Two completions of a prompt, of which one is preferred."""

    prompt: str
    chosen: str = Field(min_length=1)
    rejected: str = Field(min_length=1)

    def sequences(self) -> tuple[SingleExample, SingleExample]:
        """The chosen one, then the rejected one."""
        return tuple(  # type: ignore[return-value]
            PromptCompletion(prompt=self.prompt, completion=completion)
            for completion in (self.chosen, self.rejected)
        )


class ChatPair(Line):
    """Two continuations of a chat, of which one is preferred. Only what the assistant says in them counts."""

    messages: list[Message] = Field(fail_fast=True)
    """The chat so far."""
    chosen: list[Message] = Field(min_length=1, fail_fast=True)
    rejected: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _has_answers(self) -> "ChatPair":
        for name, own in (("chosen", self.chosen), ("rejected", self.rejected)):
            if not any(message.role == "assistant" and message.weight for message in own):
                raise ValueError(f"{name} needs at least one message with the role assistant")
        return self

    def sequences(self) -> tuple[SingleExample, SingleExample]:
        """The chosen one, then the rejected one."""
        before = [message.model_copy(update={"weight": 0}) for message in self.messages]
        return tuple(  # type: ignore[return-value]
            Chat(messages=[*before, *answer], tools=self.tools) for answer in (self.chosen, self.rejected)
        )


class LabelledCompletion(PromptCompletion):
    """A completion that is desirable or not."""

    label: bool


class LabelledChat(Chat):
    """A chat in which what the assistant says is desirable or not."""

    label: bool


Labelled = LabelledCompletion | LabelledChat
Pair = PromptPair | ChatPair
Example = SingleExample | Pair | Labelled

_CLASSES: dict[DataFormat, tuple[tuple[set[str], type[Example]], ...]] = {
    "preference": (
        ({"messages", "chosen", "rejected"}, ChatPair),
        ({"prompt", "chosen", "rejected"}, PromptPair),
    ),
    "unpaired_preference": (
        ({"messages", "label"}, LabelledChat),
        ({"prompt", "completion", "label"}, LabelledCompletion),
    ),
    "classification": (({"text", "label"}, ClassifiedText),),
    "messages": (({"messages"}, Chat),),
    "prompt_completion": (({"prompt", "completion"}, PromptCompletion),),
    "text": (({"text"}, TextExample),),
}
"""The classes that validate a line of each format, by the keys that it needs; the first that match are
taken."""


def _class_for(name: DataFormat, row: dict[str, Any]) -> type[Example] | None:
    """The class of a format that the keys of the row belong to."""
    if name == "unpaired_preference" and not isinstance(row.get("label"), bool):
        return None  # a class index or a score, not a preference
    if name == "classification" and not isinstance(row.get("label"), bool | int | str):
        return None  # a score, or none
    return next((own for keys, own in _CLASSES[name] if keys <= row.keys()), None)


def sequences_of(example: Example) -> tuple[SingleExample, ...]:
    """What becomes tokens: the example itself, or both answers of a pair."""
    return example.sequences() if isinstance(example, PromptPair | ChatPair) else (example,)


def unused_keys(example: Example) -> set[str]:
    """The keys of a line, and of its messages, that the trainer ignores."""
    found = set(example.model_extra or ())
    for name in ("messages", "chosen", "rejected"):
        turns = getattr(example, name, None)
        if isinstance(turns, list):
            found |= {f"{name}.{key}" for turn in turns for key in turn.model_extra or ()}
    return found


MAX_CLASSES = 1000
MAX_BYTES_OF_CLASSES = 2**15
"""The most bytes, as UTF-8, of all class names of a file together: each job on the file keeps them."""


class Classes:
    """Collects the classes of a file's lines."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._bytes = 0

    @property
    def _are_too_many(self) -> bool:
        return len(self._names) > MAX_CLASSES or self._bytes > MAX_BYTES_OF_CLASSES

    def note(self, example: Example) -> None:
        if not isinstance(example, ClassifiedText) or self._are_too_many:
            return
        if example.class_name not in self._names:
            self._names.add(example.class_name)
            self._bytes += len(example.class_name.encode("utf-8", "surrogatepass"))

    def found(self) -> tuple[str, ...] | None:
        """The classes in order: by value if all are whole numbers, else by name. None if there are none, or
        more than `MAX_CLASSES`, or names of more than `MAX_BYTES_OF_CLASSES` together."""
        if not self._names or self._are_too_many:
            return None
        numbered = all(re.fullmatch(r"-?[0-9]+", name) for name in self._names)
        return tuple(sorted(self._names, key=(lambda name: (int(name), name)) if numbered else None))


_MOST_VALUES = 200_000
"""The most values in a line, counted by commas and brackets: checking each takes time."""


class BadLine(ValueError):
    """A line of a training file that cannot be used; the message says why."""


def format_of(line: dict[str, Any]) -> DataFormat:
    """The format that the keys of the line belong to.

    Raises:
        BadLine: the keys match no format.
    """
    for name in _CLASSES:
        if _class_for(name, line) is not None:
            return name
    raise BadLine(
        'expected the keys "messages", or "prompt" and "completion" (and perhaps "label"), or "text" (and '
        'perhaps "label"), or '
        '"prompt", "chosen" and "rejected", or a shape such as Alpaca\'s or ShareGPT\'s; '
        f"found {', '.join(ascii(key[:MAX_KEY_LENGTH]) for key in sorted(line)[:8]) or 'none'}. If other "
        f"columns hold the samples, assign them: columns={json.dumps(_assignment(line))}"
    )


def _assignment(line: dict[str, Any]) -> dict[str, str]:
    """Columns that make up one of the formats, if case and spaces are ignored; otherwise an example."""
    similar = {key.strip().lower(): key[:MAX_KEY_LENGTH] for key in line}
    for shapes in _CLASSES.values():
        for keys, _ in shapes:
            if keys <= similar.keys():
                return {name: similar[name] for name in sorted(keys)}
    return {"prompt": "question", "completion": "answer"}


def parse_line(raw: bytes | str, expected: DataFormat | None = None) -> tuple[DataFormat, Example]:
    """Parses a JSON line as an example of the expected format, or of the format that its keys match.

    Raises:
        BadLine: not UTF-8, not JSON, not an object, of another format, or with a wrong value.
    """
    values = sum(map(raw.count, ",[{") if isinstance(raw, str) else map(raw.count, (b",", b"[", b"{")))
    if values > _MOST_VALUES:
        raise BadLine(
            f"has more than {_MOST_VALUES:,} values, counted by commas and brackets: give one sample per line"
        )
    try:
        value = json.loads(raw if isinstance(raw, str) else raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(
            f'not valid JSON ({why_not_json(error)}): a line is an object such as {{"text": "…"}}, or '
            '{"prompt": "…", "completion": "…"}'
        ) from None
    return parse_row(value, expected)


def why_not_json(error: ValueError | RecursionError) -> str:
    """What is wrong with a line, and where in it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {min(error.pos, len(error.doc.rstrip())) + 1}"
    return str(error)[:120]


def parse_row(value: Any, expected: DataFormat | None = None) -> tuple[DataFormat, Example]:
    """Parses a sample as `parse_line` does, once it is decoded.

    Raises:
        BadLine: not an object, of another format, or with a wrong value.
    """
    if not isinstance(value, dict):
        raise BadLine(f"expected a JSON object, found {type(value).__name__}")
    try:
        row = canonical(value)
        unstorable = path_to_unstorable(row)
    except BadShape as error:
        raise BadLine(str(error)) from None
    except RecursionError:
        raise BadLine("is nested too deeply") from None
    own = _class_for(expected, row) if expected else None
    name = expected if expected and own is not None else format_of(row)
    if expected == "unpaired_preference" and name in ("prompt_completion", "messages"):
        raise BadLine("label: missing, or not true or false, although other lines are labelled answers")
    if expected == "classification" and name == "text":
        raise BadLine("label: missing, or neither text nor a whole number, although other lines have labels")
    if expected and name != expected:
        raise BadLine(f"this is a {name} line, but the format is {expected}")
    own = own or _class_for(name, row)
    assert own is not None, "the format was found by its classes"
    if unstorable is not None:
        raise BadLine(f"{'.'.join(unstorable)}: has a NUL character or a lone surrogate")
    try:
        return name, own.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part)[:MAX_KEY_LENGTH] for part in first["loc"]) or "line"
        raise BadLine(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
