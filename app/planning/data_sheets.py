"""What the vendors' data sheets say of GPUs: memory, and the peak of dense matrix products."""

import re
from dataclasses import dataclass
from string import ascii_uppercase

from app.contract.spec import RunPrecision


@dataclass(frozen=True)
class DataSheet:
    """A GPU's figures. Those of products are in teraflops: 10¹² operations per second."""

    memory_gib: int
    """The memory, whose GB on data sheets are taken as GiB."""
    half_teraflops: float
    """In fp16, with sums in fp32; without tensor cores, in fp32."""
    fp32_teraflops: float
    """In fp32 without TF32."""
    has_bf16: bool = True
    """Whether its tensor cores compute in bf16 and TF32 (Ampere and later)."""
    mig_units: int = 7
    """How many units of compute a GPU has that can be divided (NVIDIA's MIG user guide)."""

    def teraflops(self, precision: RunPrecision) -> float:
        """The peak in a precision. A GPU without bf16 computes it as fp32."""
        if precision == "fp16":
            return self.half_teraflops
        if self.has_bf16 and precision in ("bf16", "pure_bf16"):
            return self.half_teraflops
        if self.has_bf16 and precision == "tf32":
            return self.half_teraflops / 2
        return self.fp32_teraflops


_BEFORE_AMPERE = {
    "P4": (8, 5.5, 5.5), "P40": (24, 11.8, 11.8), "P100": (16, 9.3, 9.3), "V100": (16, 125, 15.7),
    "V100PCIE": (16, 112, 14), "T4": (16, 65, 8.1), "T4G": (16, 65, 8.1),
    "QUADRORTX6000": (24, 130.5, 16.3), "QUADRORTX8000": (48, 130.5, 16.3),
    "GTX1070": (8, 6.5, 6.5), "GTX1080": (8, 8.9, 8.9), "GTX1080TI": (11, 11.3, 11.3),
    "TITANV": (12, 110, 13.8), "TITANRTX": (24, 130.5, 16.3),
    "RTX2070": (8, 29.9, 7.5), "RTX2080": (8, 40.3, 10.1), "RTX2080TI": (11, 53.8, 13.4),
}  # fmt: skip

_SINCE_AMPERE = {
    "A2": (16, 18, 4.5), "A10": (24, 125, 31.2), "A10G": (24, 70, 35), "A16": (16, 18, 4.5),
    "A30": (24, 165, 10.3), "A40": (48, 150, 37.4), "A100": (40, 312, 19.5), "A800": (80, 312, 19.5),
    "L4": (24, 121, 30.3), "L20": (48, 119.5, 59.8), "L40": (48, 181, 90.5), "L40S": (48, 362, 91.6),
    "H20": (96, 148, 44), "H100": (80, 989, 67), "H100PCIE": (80, 756, 51), "H100NVL": (94, 835, 60),
    "H800": (80, 989, 67), "H800PCIE": (80, 756, 51), "H200": (141, 989, 67), "H200NVL": (141, 835, 60),
    "GH200": (96, 989, 67), "B200": (180, 2250, 75), "GB200": (186, 2500, 80),
    "RTXA4000": (16, 76.7, 19.2), "RTXA4500": (20, 94.6, 23.7), "RTXA5000": (24, 111, 27.8),
    "RTXA5500": (24, 136, 34.1), "RTXA6000": (48, 155, 38.7),
    "RTX4000ADA": (20, 107, 26.7), "RTX5000ADA": (32, 261, 65.3), "RTX6000ADA": (48, 364, 91.1),
    "RTXPRO6000": (96, 500, 125),
    "RTX3050": (8, 18.2, 9.1), "RTX3060": (12, 25.5, 12.7), "RTX3060TI": (8, 32.4, 16.2),
    "RTX3070": (8, 40.6, 20.3), "RTX3070TI": (8, 43.5, 21.7), "RTX3080": (10, 59.5, 29.8),
    "RTX3080TI": (12, 68.2, 34.1), "RTX3090": (24, 71, 35.6), "RTX3090TI": (24, 80, 40),
    "RTX4060": (8, 30.2, 15.1), "RTX4060TI": (8, 44.1, 22.1), "RTX4070": (12, 58.3, 29.1),
    "RTX4070SUPER": (12, 70.9, 35.5), "RTX4070TI": (12, 80.2, 40.1), "RTX4070TISUPER": (16, 88.2, 44.1),
    "RTX4080": (16, 97.5, 48.7), "RTX4080SUPER": (16, 104, 52.2), "RTX4090": (24, 165, 82.6),
    "RTX4090D": (24, 147, 73.5),
    "RTX5060": (8, 38.4, 19.2), "RTX5060TI": (8, 47.4, 23.7), "RTX5070": (12, 61.7, 30.9),
    "RTX5070TI": (16, 87.9, 43.9), "RTX5080": (16, 113, 56.3), "RTX5090": (32, 210, 105),
    "RTX3050LAPTOPGPU": (4, 14.2, 7.1), "RTX3060LAPTOPGPU": (6, 26.2, 13.1),
    "RTX3070LAPTOPGPU": (8, 33.2, 16.6), "RTX4050LAPTOPGPU": (6, 24.3, 12.1),
    "RTX4060LAPTOPGPU": (8, 29.1, 14.6), "RTX4070LAPTOPGPU": (8, 40.1, 20.1),
    "RTX4080LAPTOPGPU": (12, 67.8, 33.9), "RTX4090LAPTOPGPU": (16, 85.8, 42.9),
    "RTX5060LAPTOPGPU": (8, 35.8, 17.9), "RTX5070LAPTOPGPU": (8, 49.9, 24.9),
    "RTX5070TILAPTOPGPU": (12, 62, 31), "RTX5080LAPTOPGPU": (16, 83.4, 41.7),
    "RTX5090LAPTOPGPU": (24, 114, 57),
}  # fmt: skip

_MIG_UNITS = {"A30": 4, "RTXPRO6000": 4}

DATA_SHEETS = {name: DataSheet(*figures, has_bf16=False) for name, figures in _BEFORE_AMPERE.items()} | {
    name: DataSheet(*figures, mig_units=_MIG_UNITS.get(name, 7)) for name, figures in _SINCE_AMPERE.items()
}
"""Each GPU that is known, by the name of nvidia-smi in capitals, without spaces and vendor.

Of a GPU that is sold with several sizes of memory, it is the smallest common one. The peaks of laptops' GPUs
are those at the highest power; where NVIDIA states only AI TOPS, they are derived from these.
"""

_NOT_IN_NAMES = re.compile(
    r"[-_ ]|NVIDIA|GEFORCE|TESLA|GENERATION|BLACKWELL|SXM\d?|HBM\dE?|MAX-Q|(SERVER|WORKSTATION) EDITION"
)
"""Parts of the names that nvidia-smi prints which the names of `DATA_SHEETS` leave out."""

_SERIES = ("", "RTX", "GTX")
"""What may be missing before a name, as in 4090 and A6000."""

_SIZE = re.compile(r"(?:^|[-_ ])\d+(\.\d+)? ?G(I?B)?\b")
_MIG = re.compile(r" MIG .*")


def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the GPU with exactly this name, such as "RTX 4090" or "NVIDIA H100 PCIe"; None if it
    is not known."""
    short = _NOT_IN_NAMES.sub("", name.upper())
    for known in (short, short.replace("PCIE", "")):
        for series in _SERIES:
            if (sheet := DATA_SHEETS.get(series + known)) is not None:
                return sheet
    return None


def similar_data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the GPU whose name is a part of this one, which may also contain sizes or a slice
    (MIG), as in "NVIDIA A40-48Q"; None if none is known."""
    name = _SIZE.sub("", _MIG.sub("", name.upper()))
    if (exact := data_sheet(name)) is not None:
        return exact
    parts = re.findall(r"(?<![A-Z])[A-Z]*\d+[A-Z]*", name)
    found = (data_sheet(number) for part in parts for number in (part, part.rstrip(ascii_uppercase)))
    return next((sheet for sheet in found if sheet is not None), None)
