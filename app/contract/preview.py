"""What a trainer will see of a data set."""

from typing import Annotated

from pydantic import Field

from app.contract.architecture import ModelReference
from app.contract.base import Answer, Frozen
from app.contract.data_formats import DataFormat
from app.contract.spec import DataSpec, Overlength


class PreviewSpec(Frozen):
    """What is to be looked at, and with which model's tokenizer."""

    model: ModelReference
    data: DataSpec
    shown: int
    """Samples that are given with their tokens."""


class PreviewedSample(Answer):
    """One training sample: `tokens`, `token_ids` and `counts` are of the same length."""

    line: int = Field(description="Of the file, from 1")
    tokens: Annotated[tuple[str, ...], Field(fail_fast=True)] = Field(
        description="Their texts; a character's is with the last token of it"
    )
    token_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31)], ...], Field(fail_fast=True)]
    counts: Annotated[tuple[bool, ...], Field(fail_fast=True)] = Field(
        description="Which tokens count for the loss"
    )
    target_tokens: int = Field(description="Those that count; the first token is never predicted")


class LengthBin(Answer):
    """Examples of `at_least` up to, and without, `below` tokens."""

    at_least: int
    below: int
    examples: int


class Lengths(Answer):
    """Tokens of examples, before any is cut."""

    examples: int = Field(description="How many were measured: all, or a sample spread evenly over the file")
    shortest: int
    median: float = Field(ge=0, allow_inf_nan=False)
    mean: float = Field(ge=0, allow_inf_nan=False)
    longest: int
    over_max_length: int = Field(description="Examples that max_length cuts, splits or refuses")
    without_targets: int = Field(description="Examples of which nothing counts within max_length")
    target_share: float = Field(ge=0, le=1, description="Of the tokens within max_length, those that count")
    histogram: Annotated[tuple[LengthBin, ...], Field(fail_fast=True, max_length=100)]


class DatasetPreview(Answer):
    """A data set as the trainer will see it."""

    file_id: str
    model_name: str
    format: DataFormat
    examples: int
    max_length: int
    overlength: Overlength
    samples: Annotated[tuple[PreviewedSample, ...], Field(fail_fast=True, max_length=20)]
    lengths: Lengths
