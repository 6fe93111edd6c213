"""Exports on the wire."""

from typing import Literal

from pydantic import Field, model_validator

from app.contract.base import Request, ResponseModel
from app.contract.export import ExportedFile, ExportFormat, ExportType, Verification

ExportStatus = Literal["queued", "running", "succeeded", "failed"]


class ExportRequest(Request):
    """What to export, and how."""

    format: ExportFormat = Field(
        "merged",
        description="merged: the whole model as safetensors, adapters merged; adapter: LoRA's matrices "
        "alone; gguf: one file for llama.cpp and Ollama, where the worker has llama.cpp's converter",
    )
    type: ExportType | None = Field(
        None,
        description="Type of the weights; null: the type of the trained model if it was saved whole, "
        "and otherwise the type in which its base model is stored. "
        "q8_0 (8 bits) only for gguf. Adapters stay as they were trained",
    )

    @model_validator(mode="after")
    def _suits_the_format(self) -> "ExportRequest":
        if self.format == "adapter" and self.type is not None:
            raise ValueError("type: adapters are exported as they were trained: leave type out")
        if self.type == "q8_0" and self.format != "gguf":
            raise ValueError("type: q8_0 is a type of GGUF files: set format to gguf, or choose bf16")
        return self


class ExportCommands(ResponseModel):
    """Shell commands that use an export, and Python for `transformers`. Replace `DIR` by the folder with its
    files, and `BASE` as the notes say."""

    transformers: str = Field(description="Python that loads it")
    vllm: str | None = Field(description="null: vLLM does not read it")
    ollama: str | None = Field(description="null: Ollama does not read it")


class ExportResponse(ResponseModel):
    id: str
    training_id: str
    format: ExportFormat
    type: ExportType | None = Field(description="Type of the weights; null for adapters, or not known yet")
    status: ExportStatus
    error: str | None = Field(description="Why it failed")
    created_at: int = Field(description="Unix seconds")
    finished_at: int | None
    files: list[ExportedFile]
    bytes: int = Field(description="Of all files")
    verification: Verification | None = Field(
        description="The comparison with the trained model; an export that does not agree with it fails"
    )
    notes: list[str]
    commands: ExportCommands | None = Field(description="null until it has succeeded")
    download: str | None = Field(description="Address of its files as a tar; null until it has succeeded")


class ExportDeleted(ResponseModel):
    id: str
    deleted: Literal[True] = True
