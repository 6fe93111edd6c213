import pytest

from app.planning.devices import GIB, parse_declared, parse_device


@pytest.mark.parametrize(
    ("phrase", "gigabytes"),
    [
        ("24GB", 24),
        ("24 GiB", 24),
        ("A100-80GB", 80),
        ("A100", 40),
        ("RTX 4090", 24),
        ("NVIDIA T4", 16),
        ("1.5gb", 1.5),
        ("4090", 24),
        ("A6000", 48),
        ("4090-24GB", 24),
        ("RTX2080TI11GB", 11),
        ("4060 Ti 16GB", 16),
        ("4096 GB", 4096),
        ("1000.5GB", 1000.5),
        ("NVIDIA B200", 180),
        ("NVIDIA T4G", 16),
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H100 PCIe", 80),
        ("NVIDIA H100 NVL", 94),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA GeForce RTX 3070 Ti", 8),
        ("Tesla P40", 24),
        ("NVIDIA A10G", 24),
        ("A10G-24GB", 24),
        ("Quadro RTX 8000", 48),
        ("NVIDIA GeForce RTX 4090 D", 24),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("Tesla V100-SXM2-32GB", 32),
        ("NVIDIA GH200 480GB", 96),
        ("NVIDIA GH200 144G HBM3e", 144),
        ("NVIDIA RTX 6000 Ada Generation", 48),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5),
    ],
)  # fmt: skip
def test_phrases_for_devices(phrase: str, gigabytes: float) -> None:
    assert parse_device(phrase, 0).memory_bytes == int(gigabytes * GIB)


@pytest.mark.parametrize(
    ("phrase", "name"),
    [
        ("A100-80GB", "A100"), ("2080 8GB", "2080"), ("H100 80GB PCIe", "H100 PCIe"), ("24GB", "24GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"), ("RTX 4090", "RTX 4090"), ("RTX2080TI11GB", "RTX2080TI"),
    ],
)  # fmt: skip
def test_a_declared_device_has_the_name_without_its_size(phrase: str, name: str) -> None:
    assert parse_device(phrase, 0).name == name


def test_declared_devices_are_numbered() -> None:
    assert [device.id for device in parse_declared(["24GB", "A100-80GB"])] == [0, 1]


@pytest.mark.parametrize(
    "phrase",
    ["", "GB", "0GB", "-4GB", "toaster", "24", "T9G", "V10032GB", "RTX409024GB", "H100 HBM3 80", "80GB HBM"],
)
def test_invalid_devices_are_rejected(phrase: str) -> None:
    with pytest.raises(ValueError, match="give its memory"):
        parse_device(phrase, 0)
