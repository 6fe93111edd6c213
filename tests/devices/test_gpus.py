"""GPUs through GPUtil, with a stand-in nvidia-smi on the PATH that answers as the real one does."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.devices import gpus
from app.jobs.queue import gpu_mask
from app.planning.devices import GIB, MAX_GPU_ID, Device
from tests.harness.runs import until
from workers.leases import _as_row
from workers.slots import Slots
from workers.trainer_process import device_environment, is_passed_on

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
    assert second.device == Device(1, "NVIDIA RTX A5000", 24 * GIB, "cuda", expandable_segments=True)


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


@pytest.mark.usefixtures("nvidia_smi")
def test_segments_grow_by_default_in_plans_and_in_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    device = gpus.detected()[0].device
    assert device.expandable_segments
    assert device_environment([device])["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    device = gpus.detected()[0].device
    assert not device.expandable_segments
    assert "PYTORCH_ALLOC_CONF" not in device_environment([device])


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


LISTED = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 1g.10gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA RTX A5000 (UUID: GPU-bbbb)
"""


def test_slices_of_a_gpu_are_devices_with_their_own_memory(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = f"if [ \"$1\" = -L ]; then cat <<'END'\n{LISTED}END\nelse cat <<'END'\n{ANSWER}END\nfi\n"
    nvidia_smi.write_text(f"#!/bin/sh\n{answers}")
    whole, large, small = gpus.detected()
    assert (whole.id, whole.uuid) == (1, "GPU-bbbb")
    assert (large.id, large.device.uuid, large.memory_total_bytes) == (2, "MIG-1111", 38 * GIB)
    assert (small.id, small.name) == (3, "NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert 9 * GIB < small.memory_total_bytes < 9.6 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    assert [gpu.id for gpu in gpus.detected()] == [3]
    for name in ("0", "GPU-aaaa"):  # CUDA uses the first slice
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        assert [gpu.id for gpu in gpus.detected()] == [2]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "_FRESH_SECONDS", 0.0)
    nvidia_smi.write_text(f"#!/bin/sh\n{answers.replace('then cat', 'then exit 3; cat')}")
    assert [gpu.id for gpu in gpus.detected()] == [1, 2, 3]  # not GPU 0 as a whole


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("visible", "ids"),
    [("GPU-b", [1]), ("GPU-", []), ("1,0", [0, 1]), ("0,-1,1", [0]), ("0,7,1", [0]), ("NoDevFiles", [])],
)
def test_gpus_are_named_as_cuda_names_them(
    visible: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.id for gpu in gpus.detected()] == ids


@pytest.mark.parametrize(("memory", "ids"), [("[N/A]", [1]), ("0", [])])
def test_a_gpu_without_memory_is_left_out(nvidia_smi: Path, memory: str, ids: list[int]) -> None:
    """GPUtil divides by the memory, so that with a zero it shows no GPU at all."""
    nvidia_smi.write_text(f"#!/bin/sh\ncat <<'END'\n{ANSWER.replace('81920', memory)}END\n")
    assert [gpu.id for gpu in gpus.detected()] == ids


def test_no_job_starts_on_a_gpu_once_nvidia_smi_has_not_answered_for_long(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when one GPU is lost: then nvidia-smi fails for all of them."""
    slots = Slots()
    [device, _] = slots.usable()
    nvidia_smi.write_text(
        "#!/bin/sh\necho 'Unable to determine the device handle for GPU 0: GPU is lost'\nexit 15\n"
    )
    monkeypatch.setattr(gpus, "_FRESH_SECONDS", 0.0)
    assert len(slots.usable()) == 2
    monkeypatch.setattr("workers.slots._SILENT_SECONDS", -1.0)
    assert slots.usable() == []
    assert not slots.is_gone(device)  # so that no trainer that works is ended


@pytest.mark.usefixtures("nvidia_smi")
def test_trainers_get_their_gpus_by_uuid() -> None:
    devices = [gpu.device for gpu in gpus.detected()]
    environment = device_environment(devices[::-1])
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb,GPU-aaaa"
    assert environment["ACCRUE_GPU_NAMES"] == "1=GPU-bbbb,0=GPU-aaaa"
    unnamed = [Device(3, "A100", 40 * GIB, "cuda")]
    assert device_environment(unnamed)["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    "name", ["CC", "CXX", "USER", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE", "BNB_CUDA_VERSION",
             "CUDNN_LOGLEVEL_DBG", "CUBLAS_WORKSPACE_CONFIG"],
)  # fmt: skip
def test_trainers_get_the_variables_of_compilers_and_libraries(name: str) -> None:
    assert is_passed_on(name)


def test_workers_store_devices_without_uuid() -> None:
    row = _as_row(Device(0, "A100", 40 * GIB, "cuda", uuid="GPU-aaaa"))
    assert Device(**row) == Device(0, "A100", 40 * GIB, "cuda")
    assert "uuid" not in row


def test_a_worker_waits_for_an_nvidia_smi_that_is_slow_at_first(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(gpus, "_FRESH_SECONDS", 0.1)
    answering = nvidia_smi.read_text()
    nvidia_smi.write_text("#!/bin/sh\n[ $# = 1 ] || sleep 1\n" + answering.removeprefix("#!/bin/sh\n"))
    monkeypatch.setattr(gpus, "_slices", list)
    assert [device.id for device in Slots().usable()] == [0, 1]


def test_a_worker_trains_on_the_cpu_if_nvidia_smi_fails_again_and_again(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_FRESH_SECONDS", 0.05)
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: driver not loaded'\nexit 9\n")
    assert [device.kind for device in Slots().usable()] == ["cpu"]


def test_gpus_that_no_job_can_name_are_offered_without_a_number() -> None:
    assert gpu_mask([0, MAX_GPU_ID, MAX_GPU_ID + 1, 200]) == 1 + (1 << MAX_GPU_ID)
    assert gpu_mask(range(300)) < 2**63


def test_listing_slices_may_take_as_long_as_a_driver_takes_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without persistence mode, every call of nvidia-smi loads the driver."""
    limits: list[float] = []

    def slow(command: list[str], *, timeout: float, **_: Any) -> Any:
        limits.append(timeout)
        return SimpleNamespace(stdout="")

    monkeypatch.setattr(subprocess, "run", slow)
    assert gpus._slices() == []
    gpus._compute_capabilities.cache_clear()
    assert gpus._compute_capabilities() == {}
    gpus._compute_capabilities.cache_clear()
    assert limits == [60.0, 60.0]
