"""Gradients that are summed on the host while the backward pass goes on; here, copies take their time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.training.gradients import host_sums
from workers.training.gradients.gradient_sums import SeparateAccumulator
from workers.training.gradients.host_sums import HostSums
from workers.training.window import Clipping, Window

CPU = torch.device("cpu")


def late(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """A copy that holds nothing until it is waited for, as one that the device has not made yet."""
    copied = torch.full_like(tensor, float("nan"), device="cpu")
    return copied, lambda: copied.copy_(tensor)


def trained(background: HostSums | None, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = SeparateAccumulator(model.parameters(), host=CPU, background=background)
    window = Window(model.parameters(), optimizer, Clipping(1.0), gradients=gradients)
    for _ in range(4):
        window.open(denominator=24.0)
        for _ in range(3):
            window.add(model(torch.randn(8, 16, dtype=dtype)).square().sum())
        assert window.close().applied
    gradients.release()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sums_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    one, other = trained(HostSums(CPU, late), dtype), trained(None, dtype)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_few_gradients_wait_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sums, "PENDING_BYTES", 100)
    may_arrive, waiting, most = threading.Semaphore(0), [0, 0], threading.Lock()

    def copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
        with most:
            waiting[0] += tensor.nbytes
            waiting[1] = max(waiting)

        def wait() -> None:
            may_arrive.acquire()
            with most:
                waiting[0] -= tensor.nbytes

        return tensor.clone(), wait

    sums = HostSums(CPU, copy)
    parameters = [torch.zeros(size) for size in (10, 10, 10, 50, 10)]  # of 40 and 200 bytes

    def add_all() -> None:
        for parameter in parameters:
            sums.add(parameter, torch.ones_like(parameter))

    adding = threading.Thread(target=add_all)
    adding.start()
    for _ in parameters:
        may_arrive.release()
    adding.join(60)
    found = sums.sums()
    assert [float(found[parameter].sum()) for parameter in parameters] == [10, 10, 10, 50, 10]
    assert waiting[1] <= 200  # the largest one, alone
    sums.close()


def test_a_failed_copy_fails_the_window_and_not_the_next_one() -> None:
    fails = [True]

    def copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
        does_fail = fails[0]

        def wait() -> None:
            if does_fail:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return tensor.clone(), wait

    sums, parameter = HostSums(CPU, copy), torch.zeros(3)
    sums.add(parameter, torch.ones(3))
    fails[0] = False
    sums.add(parameter, torch.ones(3))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sums.sums()
    sums.clear()
    sums.add(parameter, torch.ones(3))
    assert sums.sums()[parameter].tolist() == [1.0, 1.0, 1.0]
    sums.close()


def test_a_copy_that_cannot_begin_does_not_block_the_next_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pinned memory, of which there may be too little."""
    monkeypatch.setattr(host_sums, "PENDING_BYTES", 10)
    fails = [True]

    def copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
        if fails.pop() if fails else False:
            raise RuntimeError("CUDA error: out of memory")
        return tensor.clone(), lambda: None

    sums, parameter = HostSums(CPU, copy), torch.zeros(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        sums.add(parameter, torch.ones(3))
    sums.clear()
    adding = threading.Thread(
        target=lambda: [sums.add(parameter, torch.ones(3)) for _ in range(3)], daemon=True
    )
    adding.start()
    adding.join(20)
    assert not adding.is_alive()
    assert sums.sums()[parameter].tolist() == [3.0, 3.0, 3.0]
    sums.close()


def test_a_failure_after_the_last_pass_is_found_before_the_window_is_closed() -> None:
    def copy(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
        def wait() -> None:
            raise RuntimeError("CUDA error: out of memory")

        return tensor.clone(), wait

    layer = nn.Linear(3, 1)
    gradients = SeparateAccumulator(layer.parameters(), host=CPU, background=HostSums(CPU, copy))
    window = Window(layer.parameters(), torch.optim.SGD(layer.parameters(), lr=0.1), gradients=gradients)
    window.open(denominator=1.0)
    window.add(layer(torch.ones(1, 3)).sum())
    with pytest.raises(RuntimeError, match="out of memory"):
        window.wait_until_added()
    window.abandon()
    gradients.release()


def test_a_window_of_low_precision_is_summed_in_fp32() -> None:
    sums: Any = HostSums(CPU, late)
    parameter = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(300):
        sums.add(parameter, torch.ones(1, dtype=torch.bfloat16))
    assert sums.sums()[parameter].item() == 300.0  # bf16 would stop at 256
    sums.close()
