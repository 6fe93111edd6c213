"""What a plan knows of a device, and devices declared as text, such as "24GB" or "A100-80GB"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.planning.data_sheets import DATA_SHEETS, data_sheet

GIB, MIB = 2**30, 2**20

_GH200_WITH_HOST_MEMORY = re.compile(r"GH200[-_ ]*480 *GB?", re.IGNORECASE)
"""A name of nvidia-smi's with the size of the host's memory instead of the GPU's."""

MAX_DEVICES = 1024
"""The largest number of devices that a job may request."""

MAX_GPU_ID = 62
"""The highest number of a GPU that a job may name, so that a set of GPUs fits into 63 bits."""

MAX_DEVICE_LENGTH = 60
"""The most characters of a declared device: the time to parse them grows quadratically."""

_LARGEST_GB = 10**6

_WITH_SIZE = re.compile(
    r"^(?:(?P<name>(?:[A-Za-z]|\d{4}(?=[-_ ])).*?(?=[-_ ])|[A-Za-z]\D*\d.*?(?<=[A-Za-z.]))[-_ ]*)?"
    r"(?P<size>\d+(?:\.\d+)?) *(?:GB|GIB|G)(?P<form>(?:[-_ ]+(?:PCIE|SXM\d?|HBM\dE?))*)$",
    re.IGNORECASE | re.ASCII,
)
"""A name and a size. What precedes a size without a space has a number of its own: H10080GB is not clear."""


@dataclass(frozen=True)
class Device:
    """A device, with its whole memory in bytes."""

    id: int | str
    name: str
    memory_bytes: int
    kind: Literal["cpu", "cuda"]
    expandable_segments: bool = False
    """Whether trainers on this device use PyTorch's expandable segments."""
    compute_capability: float | None = None
    """The compute capability of a GPU, such as 8.6; None if unknown."""
    uuid: str | None = field(default=None, compare=False)
    """The name by which CUDA selects a GPU or a slice of one (MIG); None: by its number."""
    context_bytes: int | None = field(default=None, compare=False)
    """What a process holds on a GPU besides its tensors, as measured; None if unknown."""


def common_name(devices: Sequence[Device]) -> str | None:
    """The common name of devices; None if their names differ."""
    names = {device.name for device in devices}
    return names.pop() if len(names) == 1 else None


def parse_device(phrase: str, device_id: int) -> Device:
    """Parses a declared device: its memory, its name, or both, as in "24GB", "RTX 4090", "A100-80GB", or
    "NVIDIA H100 80GB HBM3", as nvidia-smi prints it.

    Raises:
        ValueError: the text contains neither a size nor a known name.
    """
    phrase = phrase.strip()
    if len(phrase) > MAX_DEVICE_LENGTH:
        raise ValueError(f"{phrase[:20]!r}… is longer than {MAX_DEVICE_LENGTH} characters")
    known = _GH200_WITH_HOST_MEMORY.sub("GH200", phrase)
    sheet = data_sheet(known)
    sized = _WITH_SIZE.match(known) if sheet is None else None  # the G of A10G is no unit
    if sized and 0 < float(sized["size"]) <= _LARGEST_GB:
        form = " PCIe" if "PCIE" in sized["form"].upper() else ""
        name = sized["name"].rstrip("-_ ") + form if sized["name"] else phrase
        return Device(device_id, name, int(float(sized["size"]) * GIB), "cuda")
    if sheet is None:
        hint = ""
        if phrase.isdecimal() or phrase.lower() in ("cuda", "all"):
            hint = ". This only plans for GPUs: to choose those that workers use, set CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"{phrase!r} is not a known GPU: give its memory, as in 24GB or A100-80GB, "
            f"or one of {', '.join(sorted(DATA_SHEETS))}{hint}"
        )
    return Device(device_id, phrase, sheet.memory_gib * GIB, "cuda")


def parse_declared(phrases: list[str]) -> list[Device]:
    """Declared devices, numbered from 0.

    Raises:
        ValueError: one of them cannot be parsed.
    """
    return [parse_device(phrase, number) for number, phrase in enumerate(phrases)]
