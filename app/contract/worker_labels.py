"""Labels of workers, such as zone=a, and the labels that a job requires of its worker."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

Executor = Literal["local", "process", "slurm", "ray", "kubernetes"]
"""Where a worker's trainers run (docs/engines.md)."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?$")]
_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
"""Control characters, line separators, characters without width, and what changes the direction of text."""

Value = Annotated[str, StringConstraints(pattern=rf"^[^{_UNPRINTABLE},=]{{1,100}}$", strip_whitespace=True)]
Labels = Annotated[dict[Name, Value], Field(max_length=16)]

_LABELS: TypeAdapter[dict[str, str]] = TypeAdapter(Labels)


def parse_labels(text: str) -> dict[str, str]:
    """The labels of a text such as `zone=a,gpu_type=H100`.

    Raises:
        ValueError: a part is not of the form name=value with allowed characters, a name occurs twice, or
            there are more than 16 labels.
    """
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    found = {name.strip(): value.strip() for name, _, value in parts}
    try:
        labels = _LABELS.validate_python(found)
    except ValidationError:
        labels = None
    if labels is None or len(found) < len(parts) or not all(equals for _, equals, _ in parts):
        raise ValueError("labels are given as name=value, separated by commas: zone=a,gpu_type=H100")
    return labels


def meets(labels: Mapping[str, str], requirements: Mapping[str, str]) -> bool:
    """Whether a worker with these labels has all that are required."""
    return requirements.items() <= labels.items()


def no_worker_warning(requirements: Mapping[str, str]) -> str:
    """The warning of a plan that was made while no running worker had these labels."""
    return f"no running worker has the labels {labels_text(requirements)}: the job waits for one"


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as people read them: `zone=a, gpu_type=H100`."""
    return ", ".join(f"{name}={value}" for name, value in labels.items())
