"""Uploaded files, in OpenAI's shape."""

from typing import Literal

from pydantic import Field

from app.contract.base import ResponseModel
from app.contract.data_formats import DataFormat


class FileObject(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    format: DataFormat | None = Field(description="null if this is not a training file")
    examples: int | None
    classes: list[str] | None = Field(
        None, description="The labels of labelled texts, in order; null if there are none, or too many"
    )
    sha256: str | None = Field(
        None, description="SHA-256 of the content; null if this is not a training file"
    )


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
