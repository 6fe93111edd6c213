"""What a request says about its data."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from app.contract.base import Flag, Request, RequestPart, ShortText
from app.contract.data_formats import BadLine, DataFormat, Role, Weight, parse_row
from app.contract.model_reference import HubName
from app.contract.row_shapes import ColumnField
from app.contract.spec import Overlength
from app.datasets.file_types import ReadOptions, SampleBy

FileId = Annotated[str, StringConstraints(pattern=r"^file-[A-Za-z0-9]+$", max_length=100)]

Columns = Annotated[
    dict[ColumnField, Annotated[str, StringConstraints(min_length=1, max_length=200)]],
    Field(max_length=20),
]
"""Which of a file's columns holds which field, as in `{"prompt": "question", "completion": "answer"}`."""


class DatasetOptions(Request):
    """How samples are processed, whatever their source."""

    format: DataFormat | None = Field(None, description="null: detected from the file's lines")
    max_length: int | None = Field(
        None, ge=2, description="Tokens; null: the model's context length, at most 1024"
    )
    overlength: Overlength | None = Field(
        None,
        description="What happens to longer samples: truncate, split or error; null: split for plain text "
        "files, truncate for all others",
    )
    validation_split: float | None = Field(
        None, gt=0, lt=1, description="Share of the lines that is kept for evaluation"
    )
    packing: Flag = Field(
        False, description="Samples of a micro-batch share a row without padding, kept apart by attention"
    )


class InlinePrompt(RequestPart):
    """A prompt with its completion; only the completion counts toward the loss."""

    prompt: str
    completion: str = Field(min_length=1)
    weight: Weight = 1.0


class TextPart(RequestPart):
    """A part of a message's content; only text can be trained on."""

    type: Literal["text"] = "text"
    text: str


class InlineMessage(RequestPart):
    """A turn of a chat; those of the assistant count for the loss."""

    role: Role
    content: str | Annotated[list[TextPart], Field(max_length=1000)] | None = None
    weight: Literal[0, 1] = 1
    name: ShortText | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_call_id: ShortText | None = None


_INLINE_FORMATS: dict[str, DataFormat] = {
    "texts": "text",
    "prompts": "prompt_completion",
    "messages": "messages",
}


class DatasetConfig(DatasetOptions):
    """Where the samples come from: exactly one of `texts`, `prompts`, `messages`, `file_id` and `dataset`."""

    texts: list[Annotated[str, StringConstraints(min_length=1)]] | None = Field(
        None, fail_fast=True, max_length=100_000, description="Inline samples; they are stored as a file"
    )
    prompts: list[InlinePrompt] | None = Field(
        None, fail_fast=True, max_length=100_000, description="Inline prompts with their completions"
    )
    messages: list[Annotated[list[InlineMessage], Field(min_length=1, max_length=1000)]] | None = Field(
        None, fail_fast=True, max_length=100_000, description="Inline chats, each a list of messages"
    )
    file_id: FileId | None = Field(None, description="An uploaded file")
    dataset: HubName | None = Field(
        None,
        description="A file or a folder of files in the service's dataset folder, by name; or a dataset of "
        "the hub: owner/name, or owner/name@revision",
    )
    columns: Columns | None = Field(
        None, description="For dataset: which column holds which field; uploads have their own columns field"
    )
    sample_by: SampleBy | None = Field(
        None, description="For dataset: what becomes one sample of a plain text file; default: document"
    )
    validation_file_id: FileId | None = Field(None, description="An uploaded file to evaluate on")

    @model_validator(mode="after")
    def _one_source(self) -> "DatasetConfig":
        if self.validation_split is not None and self.validation_file_id is not None:
            raise ValueError("give validation_split or validation_file_id, not both")
        names = ("texts", "prompts", "messages", "file_id", "dataset")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of texts, prompts, messages, file_id and dataset")
        for name in ("columns", "sample_by"):
            if getattr(self, name) is not None and self.dataset is None:
                raise ValueError(
                    f"{name} applies to dataset: for an uploaded file, give {name} with the upload "
                    "(POST /v1/files)"
                )
        form = _INLINE_FORMATS.get(given[0])
        if form is None:
            return self
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty: give at least one sample")
        if self.format not in (None, form):
            raise ValueError(f"{given[0]} are of format {form}, not {self.format}: leave format out")
        return self

    def check_chats(self) -> None:
        """Checks the inline chats. This is not part of validation, because it takes as long as validation
        does, and the event loop would wait for both.

        Raises:
            ValueError: a chat cannot be trained on.
        """
        for number, chat in enumerate(self.messages or []):
            if not any(message.role == "assistant" and message.weight for message in chat):
                raise ValueError(f"messages.{number} needs a message of the role assistant with weight 1")
            if any(not isinstance(message.content, str) for message in chat):
                try:
                    parse_row({"messages": _as_lines(chat)})
                except BadLine as error:
                    raise ValueError(f"messages.{number}: {error}") from None

    def reading(self) -> ReadOptions:
        """How the files of `dataset` are read."""
        return ReadOptions(self.columns or {}, self.sample_by or "document")

    def inline(self) -> tuple[DataFormat, list[dict[str, Any]]] | None:
        """The request's inline samples as lines of a training file; None if the request names a file."""
        if self.texts is not None:
            return "text", [{"text": text} for text in self.texts]
        if self.prompts is not None:
            return "prompt_completion", [prompt.model_dump() for prompt in self.prompts]
        if self.messages is not None:
            return "messages", [{"messages": _as_lines(chat)} for chat in self.messages]
        return None


def _as_lines(chat: list[InlineMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in chat]
