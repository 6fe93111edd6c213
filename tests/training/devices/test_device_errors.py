"""Errors of devices: which of them mean that there is no memory, and which that the device is gone."""

import pytest
import torch

from app.planning.devices import GIB
from workers.training.devices.device import check_cuda
from workers.training.devices.device_errors import is_out_of_memory, memory_of_others
from workers.training.devices.lost_device import is_device_lost
from workers.training.exceptions import CannotTrain


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
        "HIP out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_every_kind_of_missing_memory_is_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(torch.AcceleratorError(message))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "shape '[2, 3]' is invalid for input of size 5",
    ],
)
def test_other_errors_do_not_count_as_missing_memory(message: str) -> None:
    assert not is_out_of_memory(RuntimeError(message))


def test_a_torch_without_cuda_cannot_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CannotTrain, match="built without CUDA"):
        check_cuda()


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("No CUDA GPUs are available", True),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("The NVIDIA driver on your system is too old (found version 11040).", False),
        ("Found no NVIDIA driver on your system.", False),
    ],
)
def test_a_gpu_that_was_there_and_is_gone_is_lost(
    message: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the job is retried on another one; an old driver would fail again."""

    def fail() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(RuntimeError if is_lost else CannotTrain) as raised:
        check_cuda()
    assert is_device_lost(str(raised.value)) == is_lost


def test_memory_that_other_processes_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_of_others() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (21 * GIB, 24 * GIB))
    assert memory_of_others() == ""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 24 * GIB))
    assert memory_of_others() == "other processes use about 16 GiB of this GPU: end them, or "
