"""Previews of a dataset as the trainer will read it."""

from typing import Annotated, Literal

from pydantic import Field

from app.contract.base import Frozen, ResponseModel
from app.contract.data_formats import DataFormat
from app.contract.model_reference import ModelReference
from app.contract.spec import DataSpec, Overlength


class PreviewSpec(Frozen):
    """The data to preview, and the model whose tokenizer splits it."""

    model: ModelReference
    data: DataSpec
    shown: int
    """The number of samples to return with their tokens; 0: only the lengths are of interest."""


class PreviewedSample(ResponseModel):
    """One training sample: `tokens`, `token_ids` and `counts` are of the same length."""

    line: int = Field(description="Line number in the file, from 1")
    answer: Literal["chosen", "rejected"] | None = Field(
        None, description="Which answer of a pair follows the prompt; null unless the file holds pairs"
    )
    tokens: Annotated[tuple[str, ...], Field(fail_fast=True)] = Field(
        description="Text of each token; a character of several tokens is shown with the last one"
    )
    token_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31)], ...], Field(fail_fast=True)]
    counts: Annotated[tuple[bool, ...], Field(fail_fast=True)] = Field(
        description="Which tokens count toward the loss; of a text with a label, the last one, where the "
        "label is predicted"
    )
    target_tokens: int = Field(
        description="Number of tokens that count toward the loss; a sample's first token never does"
    )


class LengthBin(ResponseModel):
    """The number of examples with at least `at_least` and fewer than `below` tokens."""

    at_least: int
    below: int
    examples: int


class Lengths(ResponseModel):
    """Lengths of the examples in tokens, before truncation or splitting; of a pair, that of the prompt with
    the longer answer."""

    examples: int = Field(description="How many were measured: all, or a sample spread evenly over the file")
    shortest: int
    median: float = Field(ge=0, allow_inf_nan=False)
    mean: float = Field(ge=0, allow_inf_nan=False)
    longest: int = Field(
        description="Tokens of the longest example, among those measured and those on the lines with "
        "the most bytes"
    )
    over_max_length: int = Field(description="Examples longer than max_length, to be cut, split or rejected")
    without_targets: int = Field(description="Examples without a target token within max_length")
    equal_answers: int = Field(
        0, description="Pairs whose chosen and rejected answers are the same within max_length"
    )
    without_tool_calls: int = Field(
        0,
        description="Chats whose tool calls the model's chat template does not render, among those that "
        "were read",
    )
    unused_keys: Annotated[tuple[str, ...], Field(fail_fast=True, max_length=20)] = Field(
        (), description="Keys of the examples that training ignores, the first that were found"
    )
    kept: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Mean tokens of an example after truncation, both answers of a pair together",
    )
    target_share: float = Field(
        ge=0, le=1, description="Share of the tokens within max_length that count toward the loss"
    )
    histogram: Annotated[tuple[LengthBin, ...], Field(fail_fast=True, max_length=100)]


class DatasetPreview(ResponseModel):
    """A dataset as the trainer will see it."""

    file_id: str
    model_name: str
    format: DataFormat
    examples: int
    max_length: int
    overlength: Overlength
    samples: Annotated[tuple[PreviewedSample, ...], Field(fail_fast=True, max_length=40)] = Field(
        description="The first samples; of each pair, the chosen and then the rejected answer"
    )
    lengths: Lengths
