"""What the export process and its child exchange: a task on the child's standard input, and a result in a
file."""

from app.contract.base import Frozen
from app.contract.export import ExportOrder

RESULT = "result.json"
"""The name of the file with the result, in the task's temporary folder."""


class ExportTask(Frozen):
    """What the child is to do, and where."""

    order: ExportOrder
    path: str
    """The base model's folder, or its name on the hub."""
    layer_paths: tuple[str, ...]
    data: str
    """The stored file with the samples to compare on."""
    folder: str
    """The export's folder; it contains only `temporary`."""
    temporary: str
    hidden: str | None
    """The data folder, in which the child may see only what it needs; None for no isolation."""
    converter: str | None
    """llama.cpp's convert_hf_to_gguf.py; None if it is not installed."""
