"""What a trainer will see of a data set."""

from pydantic import Field

from app.contract.architecture import ModelReference
from app.contract.base import Answer, Frozen
from app.contract.data_formats import DataFormat
from app.contract.spec import DataSpec, Overlength


class PreviewOrder(Frozen):
    """What is to be looked at, and with which model's tokenizer."""

    model: ModelReference
    data: DataSpec
    shown: int
    """Samples that are given with their tokens."""


class PreviewedSample(Answer):
    """One training sample: `tokens`, `token_ids` and `counts` are of the same length."""

    line: int = Field(description="Of the file, from 1")
    tokens: tuple[str, ...] = Field(description="Their texts; a character's is with the last token of it")
    token_ids: tuple[int, ...]
    counts: tuple[bool, ...] = Field(description="Which tokens count for the loss")
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
    median: float
    mean: float
    longest: int
    over_max_length: int = Field(description="Examples that max_length cuts, splits or refuses")
    without_targets: int = Field(description="Examples of which nothing counts within max_length")
    target_share: float = Field(description="Of the tokens within max_length, those that count")
    histogram: tuple[LengthBin, ...]


class DatasetPreview(Answer):
    """A data set as the trainer will see it."""

    file_id: str
    model_name: str
    format: DataFormat
    examples: int
    max_length: int
    overlength: Overlength
    samples: tuple[PreviewedSample, ...]
    lengths: Lengths
