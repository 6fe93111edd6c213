"""What another tool is to train, and how its configuration is written."""

from dataclasses import dataclass
from typing import Any

from app.contract.model_reference import LoraSpec
from app.contract.objective import ObjectiveName
from app.contract.spec import MethodSpec, OptimizerName, RunPrecision

DATA = "data.jsonl"
"""The training data, if none are named."""
OUTPUT = "output"
"""The folder that the tool writes to."""


class NotExpressible(ValueError):
    """What a tool cannot do; the message says what to change."""


@dataclass(frozen=True)
class ToolSplit:
    """Equal micro-batches: micro_batch × steps × devices is the effective batch."""

    micro_batch: int
    steps: int
    devices: int

    @property
    def effective_batch(self) -> int:
        return self.micro_batch * self.steps * self.devices


def split_evenly(effective_batch: int, devices: int, most: int) -> ToolSplit:
    """The split into the largest equal micro-batches of at most `most` samples.

    Raises:
        NotExpressible: the devices cannot share the batch equally.
    """
    own, rest = divmod(effective_batch, devices)
    if rest:
        raise NotExpressible(
            f"{effective_batch} samples cannot be shared equally by {devices} devices: choose a multiple of "
            f"{devices}, such as {max(1, round(effective_batch / devices)) * devices}"
        )
    micro = next(size for size in range(min(own, most), 0, -1) if own % size == 0)
    return ToolSplit(micro, own // micro, devices)


@dataclass(frozen=True)
class ToolJob:
    """What a tool is to train."""

    model: str
    objective: ObjectiveName
    method: MethodSpec
    split: ToolSplit
    precision: RunPrecision
    optimizer: OptimizerName
    gradient_checkpointing: bool
    max_length: int
    learning_rate: float
    epochs: int
    data: str = DATA


@dataclass(frozen=True)
class ToolConfig:
    """A tool's configuration."""

    content: str
    """A file, or for torchtune, whose own configurations are changed, a command."""
    command: str
    """What runs it, with the file as `file_name`."""
    file_name: str


def targets_of(lora: LoraSpec) -> list[str]:
    """The modules that are adapted; empty for every linear layer."""
    return list(lora.target_modules or ())


def as_word(value: Any) -> str:
    """A value as a word of a command."""
    return str(value) if not isinstance(value, bool) else "True" if value else "False"


def as_yaml(content: dict[str, Any]) -> str:
    """A configuration as YAML."""
    import yaml

    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def with_header(tool: str, job: ToolJob, launch: str | None, content: str, note: str | None = None) -> str:
    """A configuration below comments that say what it does, and how it is run.

    Args:
        launch: the command that runs it; None if it is a command itself.
    """
    micro_batch, steps, devices = job.split.micro_batch, job.split.steps, job.split.devices
    lines = [
        f"{tool}: {job.split.effective_batch} samples per step = micro-batches of {micro_batch} × {steps} "
        f"accumulation step{'s' * (steps > 1)} × {devices} device{'s' * (devices > 1)}.",
        "Accrue planned the micro-batch for its own memory use, and other tools may need more. If memory "
        "runs out, halve the micro-batch and double the steps.",
        *([f"Run it: {launch}"] if launch else []),
        *([f"Note: {note}."] if note else []),
    ]
    return "".join(f"# {line}\n" for line in lines) + content
