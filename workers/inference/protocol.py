"""What an inference process and its engines exchange: lines of JSON over a socket."""

from app.contract.base import Frozen
from app.contract.inference import AnswerPart, InferenceError, InferenceOrder
from app.contract.model_reference import ModelReference


class LoadOrder(Frozen):
    """The first line: what to load, and where."""

    model: ModelReference
    path: str
    layer_paths: tuple[str, ...] = ()
    folder: str
    """A folder for staged files."""
    adapters: str
    """A folder for adapters that come later, in which the process cannot write."""
    hidden: str | None
    """The data folder, in which the process may see only the model's files; None for no isolation."""
    environment: dict[str, str]
    """Variables to set, such as CUDA_VISIBLE_DEVICES."""
    device: str
    threads: int | None = None


class AnswerOrder(Frozen):
    """A further line: a request, or the cancellation of one."""

    id: str
    order: InferenceOrder | None = None
    """None: cancelled."""
    adapter_path: str | None = None
    key_id: str | None = None
    """The key of the request: keys take turns."""


class Reported(Frozen):
    """A line of the output."""

    ready: bool = False
    """Once: the model is loaded."""
    failed: InferenceError | None = None
    """Once, instead: it cannot be loaded."""
    id: str | None = None
    part: AnswerPart | None = None
    not_shared: bool = False
    """The request's adapters need a process of their own."""
