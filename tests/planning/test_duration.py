"""Durations from the work of a run, and from what a device has done."""

from dataclasses import replace
from math import inf

import pytest

from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import Device
from app.planning.duration import Duration, MeasuredWork, Work, fitted, work_of

CPU = Device("cpu", "CPU", 2**34, "cpu")
A100 = Device(0, "NVIDIA A100-SXM4-80GB", 80 * 2**30, "cuda")
UNKNOWN = Device(0, "NVIDIA Something", 80 * 2**30, "cuda")
TINY = from_config(TINY_GPT2)


def work(size: float, passes: float = 1e4, updates: float = 1e6) -> Work:
    return Work(operations=size, passes=passes, updates=updates)


def done(own: Work, per_pass: float = 1e-3, per_operation: float = 1e-11) -> MeasuredWork:
    """The work on a device with these rates."""
    return MeasuredWork(own, own.passes * per_pass + own.operations * per_operation, own.updates * 1e-9)


def test_operations_are_six_per_weight_and_token() -> None:
    model = TINY.model_copy(update={"hidden_size": 4096, "intermediate_size": 11008, "gated": True,
        "layers": 32, "heads": 32, "key_value_heads": 32, "head_dim": 128, "vocabulary": 32000})  # fmt: skip
    found = work_of(model, tokens=1, length=0, micro_batches=1, steps=1, adapters=False)
    assert found.operations == pytest.approx(6 * 6.6e9, rel=0.01)  # Llama 2 7B without its embedding
    adapters = work_of(model, tokens=1, length=0, micro_batches=1, steps=1, adapters=True, trained=10)
    assert adapters.operations == pytest.approx(found.operations * 2 / 3)
    assert adapters.updates == 10


def test_a_known_gpu_without_any_job_is_guessed_with_a_wide_range() -> None:
    rates = fitted(A100, "bf16", [], work(1e17))
    assert rates is not None
    found = rates.duration(work(1e17, passes=0, updates=0))
    assert found.expected == pytest.approx(1e17 / (312e12 * 0.33), rel=0.01)
    assert found.low < found.expected / 2
    assert found.high > found.expected * 2


@pytest.mark.parametrize("name", ["RTX A1000 8GB", "NVIDIA RTX A3000", "80GB"])
def test_a_gpu_with_a_similar_name_is_another_one(name: str) -> None:
    assert fitted(replace(A100, name=name), "bf16", [], work(1e17)) is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA RTX A4000", 77),
        ("NVIDIA A40", 150),
        ("NVIDIA L40S", 362),
        ("GH200", 989),
        ("A10G", 70),
        ("RTX4070TI", 80.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 85.8),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("Quadro RTX 6000", 16.3),  # it computes bf16 as fp32
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A40-48Q", 150),
        ("3090", 71),
        ("A100-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 312 / 7),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 3 * 312 / 7),
        ("NVIDIA A30 MIG 4g.24gb", 165),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb", 250),
        ("H100 80GB PCIe", 756),
        ("NVIDIA V100-PCIE-32GB", 14),  # it computes bf16 as fp32
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 989 / 7),
        ("GeForceRTX4090", 165),
        ("TeslaT4", 8.1),
        ("NVIDIARTXA6000", 155),
    ],
)
def test_a_gpu_is_known_by_a_part_of_its_name(name: str, teraflops: float) -> None:
    rates = fitted(replace(A100, name=name), "bf16", [], work(1e17))
    assert rates is not None
    expected = rates.duration(work(1e17, passes=0, updates=0)).expected
    assert expected == pytest.approx(1e17 / (teraflops * 1e12 * 0.33), rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [("Tesla T4", "fp16", 65), ("Tesla T4", "tf32", 8.1), ("Tesla T4", "fp32", 8.1),
     ("Tesla P40", "fp16", 11.8), ("NVIDIA A100 80GB PCIe", "tf32", 156), ("RTX 4090", "fp32", 82.6)],
)  # fmt: skip
def test_the_peak_depends_on_precision_and_generation(name: str, precision: str, teraflops: float) -> None:
    rates = fitted(replace(A100, name=name), precision, [], work(1e17))
    assert rates is not None
    expected = rates.duration(work(1e17, passes=0, updates=0)).expected
    assert expected == pytest.approx(1e17 / (teraflops * 1e12 * 0.33), rel=0.01)


def test_nothing_is_said_of_an_unknown_gpu_without_any_job() -> None:
    assert fitted(UNKNOWN, "bf16", [], work(1e15)) is None
    rates = fitted(UNKNOWN, "bf16", [done(work(1e15))], work(1e15))
    assert rates is not None
    true = done(work(1e15)).forward_backward_seconds
    assert rates.duration(work(1e15, updates=0)).expected == pytest.approx(true, rel=0.05)


def test_two_rates_follow_from_jobs_of_different_kinds() -> None:
    known = [done(work(1e12)), done(work(4e12, passes=1e3)), done(work(2e11, passes=3e4))]
    for other in (work(1e13), work(5e11, passes=2e4), work(3e12, passes=2e3)):
        rates = fitted(CPU, "fp32", known, other)
        assert rates is not None
        true = done(other).forward_backward_seconds + done(other).optimizer_seconds
        assert rates.duration(other).expected == pytest.approx(true, rel=0.1)


def test_the_range_narrows_with_each_job_that_agrees() -> None:
    widths = []
    for count in (0, 1, 4, 16):
        rates = fitted(CPU, "fp32", [done(work(1e12))] * count, work(1e12))
        assert rates is not None
        found = rates.duration(work(1e12))
        widths.append(found.high / found.low)
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len(widths)


def test_rates_are_never_negative() -> None:
    contradictory = [
        replace(done(work(1e12)), forward_backward_seconds=1.0),
        replace(done(work(1e13)), forward_backward_seconds=0.5),
        replace(done(work(1e12, passes=1e6)), forward_backward_seconds=0.7),
    ]
    rates = fitted(CPU, "fp32", contradictory, work(1e12))
    assert rates is not None
    assert min(rates.seconds_per_pass, rates.seconds_per_operation) >= 0
    assert 0 < rates.duration(work(1e12)).expected < inf


def test_known_time_is_added_to_all_of_the_range() -> None:
    assert Duration(10.0, 5.0, 20.0).divided(2).plus(1) == Duration(6.0, 3.5, 11.0)
