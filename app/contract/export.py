"""Exports of trained models: what is made, and how far it was compared with the trained model."""

from typing import Annotated, Literal

from pydantic import Field

from app.contract.base import Frozen
from app.contract.model_reference import ModelReference
from app.contract.spec import DataSpec

ExportFormat = Literal["adapter", "merged", "gguf"]
"""adapter: LoRA's matrices, to be loaded onto the base model; merged: a whole model as safetensors; gguf: a
whole model in one file for llama.cpp and Ollama."""

ExportType = Literal["fp32", "bf16", "fp16", "q8_0"]
"""The type of an export's weights; q8_0 (GGUF only) has 8 bits."""

FILES = "files"
"""The subfolder of an export's folder that holds its files."""

LEAST_AGREEMENT = 0.999
"""The minimum of `agreement` plus `near_ties` at which an export is valid, unless it is quantised."""

LEAST_AGREEMENT_QUANTISED = 0.9
"""The same for quantised weights. Quantisation changes some predictions, and the result says how many; below
this limit, something else must be wrong."""

NEAR_TIE_NATS = 0.02
"""Two tokens whose log-probabilities by the trained model differ by less are as good as equally probable: a
rounding of the weights may decide between them."""


class ExportOrder(Frozen):
    """What a worker is to export."""

    model: ModelReference
    """The trained model."""
    quantised_base: bool
    """Whether it was trained on a base model in 4 bits (QLoRA)."""
    name: str
    """The model's name, for commands."""
    format: ExportFormat
    type: ExportType | None
    """None: the type in which the base model is stored; if the trained model was saved whole, that in which
    it is stored."""
    data: DataSpec
    """The samples to compare on: the job's held-out samples, or if it has none, its training samples."""
    data_file: str
    """The id of the stored file."""
    seed: int
    """Of the job, which chose the held-out samples."""


class Verification(Frozen):
    """The comparison of an export, loaded as its users will load it, with the trained model, on samples of
    the job's data: the next token that each predicts after every prefix of every answer."""

    samples: Annotated[int, Field(ge=0)]
    held_out: bool
    """Whether the samples were held out from training."""
    tokens: Annotated[int, Field(ge=0)]
    """Predictions that were compared."""
    agreement: Annotated[float, Field(ge=0, le=1)]
    """The share of predictions whose most probable token is the same."""
    near_ties: Annotated[float, Field(ge=0, le=1)]
    """The share of predictions that differ, but between tokens that the trained model finds equally probable
    (within 0.02 nats)."""
    least: Annotated[float, Field(ge=0, le=1)]
    """The least of `agreement` plus `near_ties` at which an export is valid."""

    @property
    def is_valid(self) -> bool:
        return self.agreement + self.near_ties >= self.least


class ExportedFile(Frozen):
    name: Annotated[str, Field(max_length=255)]
    bytes: Annotated[int, Field(ge=0)]


class ExportResult(Frozen):
    """What a worker has made of an order."""

    error: Annotated[str, Field(max_length=2000)] | None = None
    """Why there is no export."""
    files: Annotated[tuple[ExportedFile, ...], Field(max_length=1000)] = ()
    type: ExportType | None = None
    verification: Verification | None = None
    """None only if there is an error."""
    notes: Annotated[tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=20)] = ()
    """What users of the export should know."""
