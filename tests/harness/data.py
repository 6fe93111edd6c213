"""Data specs for tests of the data."""

import hashlib
from pathlib import Path
from typing import Any

from app.contract.spec import DataSpec


def spec(form: str = "text", **changes: Any) -> DataSpec:
    fields = {"file_id": "file-1", "sha256": "0", "format": form, "examples": 1, "max_length": 1024,
              "overlength": "truncate", "packing": False, "validation": None}  # fmt: skip
    return DataSpec.model_validate({**fields, **changes})


def with_digest_of(source: Path, spec: DataSpec) -> DataSpec:
    """The spec with the SHA-256 of the source."""
    return spec.model_copy(update={"sha256": hashlib.sha256(source.read_bytes()).hexdigest()})
