"""What a plan knows of a device, and devices declared as text, such as "24GB" or "A100-80GB"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

GIB, MIB = 2**30, 2**20

_MEMORY_GB = {
    "P4": 8, "P40": 24, "P100": 16, "V100": 16, "T4": 16, "A2": 16, "A10": 24, "A10G": 24, "A16": 16,
    "A30": 24, "A40": 48, "A100": 40, "A800": 80, "L4": 24, "L20": 48, "L40": 48, "L40S": 48, "H20": 96,
    "H100": 80, "H100NVL": 94, "H800": 80, "H200": 141, "H200NVL": 141, "GH200": 96, "B200": 192,
    "GB200": 186,
    "QUADRORTX6000": 24, "QUADRORTX8000": 48, "RTXA4000": 16, "RTXA4500": 20, "RTXA5000": 24, "RTXA5500": 24,
    "RTXA6000": 48, "RTX4000ADA": 20, "RTX5000ADA": 32, "RTX6000ADA": 48, "RTXPRO6000": 96,
    "GTX1070": 8, "GTX1080": 8, "GTX1080TI": 11, "TITANRTX": 24, "TITANV": 12,
    "RTX2070": 8, "RTX2080": 8, "RTX2080TI": 11, "RTX3060": 12, "RTX3060TI": 8, "RTX3070": 8, "RTX3070TI": 8,
    "RTX3080": 10, "RTX3080TI": 12, "RTX3090": 24, "RTX3090TI": 24, "RTX4060": 8, "RTX4060TI": 16,
    "RTX4070": 12, "RTX4070SUPER": 12, "RTX4070TI": 12, "RTX4070TISUPER": 16, "RTX4080": 16,
    "RTX4080SUPER": 16, "RTX4090": 24, "RTX4090D": 24, "RTX5070": 12, "RTX5070TI": 16, "RTX5080": 16,
    "RTX5090": 32,
    "RTX4060LAPTOPGPU": 8, "RTX4070LAPTOPGPU": 8, "RTX4080LAPTOPGPU": 12, "RTX4090LAPTOPGPU": 16,
    "RTX5090LAPTOPGPU": 24,
}  # fmt: skip
"""Memory in GiB by GPU name, from the vendors' data sheets, whose GB are taken as GiB."""

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
    r"^(?:(?P<name>[A-Za-z].*?)[-_ ]*)?(?P<size>\d+(?:\.\d+)?) *(?:GB|GIB|G)"
    r"(?:[-_ ]+(?:PCIE|SXM\d?|HBM\dE?))*$",
    re.IGNORECASE | re.ASCII,
)
_NOT_IN_NAMES = re.compile(
    r"[-_ ]|NVIDIA|GEFORCE|TESLA|GENERATION|BLACKWELL|PCIE|SXM\d?|HBM\dE?|MAX-Q|(SERVER|WORKSTATION) EDITION"
)
"""Parts of the names that nvidia-smi prints which `_MEMORY_GB` leaves out."""


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
    gigabytes = _MEMORY_GB.get(_NOT_IN_NAMES.sub("", known.upper()))
    sized = _WITH_SIZE.match(known) if gigabytes is None else None  # the G of A10G is no unit
    if sized and 0 < float(sized["size"]) <= _LARGEST_GB:
        return Device(device_id, sized["name"] or phrase, int(float(sized["size"]) * GIB), "cuda")
    if gigabytes is None:
        hint = ""
        if phrase.isdecimal() or phrase.lower() in ("cuda", "all"):
            hint = ". This only plans for GPUs: to choose those that workers use, set CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"{phrase!r} is not a known GPU: give its memory, as in 24GB or A100-80GB, "
            f"or one of {', '.join(sorted(_MEMORY_GB))}{hint}"
        )
    return Device(device_id, phrase, gigabytes * GIB, "cuda")


def parse_declared(phrases: list[str]) -> list[Device]:
    """Declared devices, numbered from 0.

    Raises:
        ValueError: one of them cannot be parsed.
    """
    return [parse_device(phrase, number) for number, phrase in enumerate(phrases)]
