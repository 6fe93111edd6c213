"""The assignment: everything that a trainer gets from its worker, as its run directory's spec.json."""

from pydantic import Field

from app.contract.base import Frozen
from app.contract.plan import Plan
from app.contract.spec import Spec


class Assignment(Frozen):
    """What a trainer is to train, how, and from which files."""

    job_id: str
    attempt: int
    spec: Spec
    plan: Plan
    data_file: str
    """Absolute path of the JSONL file."""
    validation_file: str | None = None
    """Absolute path of the validation file; None if the job has none of its own."""
    model_path: str
    """Absolute path of a model's directory, or a hub id."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """Absolute paths of the programs of the spec's metrics that this machine has, by name."""
    layer_paths: tuple[str, ...] = ()
    """Absolute paths of the folders with the model's layers, in their order."""
