"""GPUs through GPUtil, with a stand-in nvidia-smi on the PATH that answers as the real one does."""

import time
from pathlib import Path

import pytest

from app.devices import gpus
from app.planning.devices import GIB, Device
from tests.harness.runs import until

ANSWER = (
    "0, GPU-aaaa, 35, 81920, 1024, 80896, 550.54, NVIDIA A100-SXM4-80GB, 123, Disabled, Disabled, 41\n"
    "1, GPU-bbbb, [N/A], 24576, 0, 24576, 550.54, NVIDIA RTX A5000, 124, Disabled, Disabled, 38\n"
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{ANSWER}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpus, "_gauge", gpus._GpuMonitor())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_are_seen_with_their_memory() -> None:
    first, second = gpus.detected()
    assert (first.name, first.memory_total_bytes, first.load) == ("NVIDIA A100-SXM4-80GB", 80 * GIB, 0.35)
    assert (first.memory_used_bytes, first.temperature_celsius) == (GIB, 41.0)
    assert second.load is None
    assert second.device == Device(1, "NVIDIA RTX A5000", 24 * GIB, "cuda")


@pytest.mark.parametrize("answer", ["Failed to initialize NVML: version mismatch", "garbage, 1"])
def test_unparsable_nvidia_smi_output_is_tolerated(nvidia_smi: Path, answer: str) -> None:
    nvidia_smi.write_text(f"#!/bin/sh\necho '{answer}'\n")
    assert gpus.detected() == []


@pytest.mark.usefixtures("nvidia_smi")
def test_hidden_gpus_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.id for gpu in gpus.detected()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa")
    assert [gpu.id for gpu in gpus.detected()] == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.detected() == []


def test_detected_gpus_are_cached_briefly(nvidia_smi: Path) -> None:
    assert len(gpus.detected()) == 2
    nvidia_smi.write_text("#!/bin/sh\nexit 1\n")
    assert len(gpus.detected()) == 2


def test_plans_are_made_for_declared_devices_first(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [Device(0, "24GB", 24 * GIB, "cuda")]
    assert gpus.for_planning(declared, []) == declared
    assert [device.id for device in gpus.for_planning([], [])] == [0, 1]
    nvidia_smi.unlink()
    monkeypatch.setattr(gpus, "_gauge", gpus._GpuMonitor())
    assert gpus.for_planning([], []) == [gpus.this_cpu()]
    elsewhere = [Device(0, "H100", 80 * GIB, "cuda")]
    assert gpus.for_planning([], elsewhere) == elsewhere


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_whose_segments_grow_is_planned_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8, expandable_segments:True")
    assert gpus.detected()[0].device.expandable_segments
    monkeypatch.setenv(name, "expandable_segments:False")
    assert not gpus.detected()[0].device.expandable_segments


def test_a_hanging_nvidia_smi_does_not_block_callers(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(gpus, "_FRESH_SECONDS", 0.0)
    assert len(gpus.detected()) == 2
    answering = nvidia_smi.read_text()
    nvidia_smi.write_text("#!/bin/sh\nsleep 1.5\n" + answering.removeprefix("#!/bin/sh\n"))
    began = time.monotonic()
    assert len(gpus.detected()) == 2  # what was seen last
    assert len(gpus.detected()) == 2  # not asked again while it hangs
    assert time.monotonic() - began < 1.0
    nvidia_smi.write_text(answering)
    until(lambda: gpus._gauge._asking is not None and not gpus._gauge._asking.is_alive(), 5)
    assert len(gpus.detected()) == 2


@pytest.mark.parametrize(
    ("device", "ids"),
    [(None, []), ("cpu", []), ("cpu:0,cpu:1", []), ("cuda:0", [0]), ("cuda:1,12", [1, 12])],
)
def test_the_gpus_of_a_job_are_read_from_its_device(device: str | None, ids: list[int]) -> None:
    assert gpus.ids_of(device) == ids
