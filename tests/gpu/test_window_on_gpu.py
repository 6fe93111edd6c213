"""The window's promises on a GPU: bf16 and fp16 autocast, and nothing read back before the end."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.contract.plan import FixedSize, TokenBudget
from tests.harness.small_models import CONFIGS, DISCONTINUOUS, Window64, loss_sum, make_model, make_window64
from workers.training.micro_batches.batches import cut_window
from workers.training.window import Clipping, LossScale, Window

TOLERANCE = {None: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def gradient(model: Any, data: Window64, groups: list[list[int]], autocast: torch.dtype | None) -> Tensor:
    window = Window(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0), Clipping(None))
    window.open(denominator=data.targets)
    for group in groups:
        batch = data.batch(group).to(torch.device("cuda"))
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_sum(model, batch)
        window.add(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


@pytest.mark.parametrize(
    ("family", "autocast"),
    [
        (family, autocast)
        for family in CONFIGS
        for autocast in TOLERANCE
        if autocast or family not in DISCONTINUOUS
    ],
    ids=str,
)
def test_every_cut_gives_the_whole_batch_s_gradient(family: str, autocast: torch.dtype | None) -> None:
    model, data = make_model(family).cuda(), make_window64()
    whole = gradient(model, data, [list(range(64))], autocast)
    for cut in (FixedSize(samples=8), TokenBudget(tokens=333)):
        split = gradient(model, data, cut_window(data.lengths, cut), autocast)
        assert float((split - whole).norm() / whole.norm()) <= TOLERANCE[autocast]


def test_an_fp16_overflow_is_replayed_at_lower_scales_until_finite() -> None:
    model, data = make_model("gpt2").cuda(), make_window64()
    scale = LossScale(2.0**40)
    window = Window(
        model.parameters(), torch.optim.AdamW(model.parameters(), fused=True), Clipping(1.0), scale
    )
    for _ in range(60):
        window.open(denominator=data.targets)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_sum(model, data.batch(list(range(64))).to(torch.device("cuda")))
        window.add(loss)
        closed = window.close()
        if not closed.overflow:
            break
    assert closed.applied
    assert scale.value < 2.0**40


def test_adding_a_micro_batch_reads_nothing_back() -> None:
    """PyTorch itself raises an error if adding a micro-batch waits for the device."""
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    window = Window([weight], torch.optim.SGD([weight], lr=0.1), Clipping(1.0))
    window.open(denominator=10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            window.add((weight**2).sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert window.close().applied
