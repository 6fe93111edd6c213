"""The promise: however a window is split, its gradient is that of the whole batch."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.contract.plan import FixedCount, FixedSize, TokenBudget
from tests.harness.small_models import PLAIN, Window64, loss_sum, make_model, promised
from workers.training.devices.stopwatch import Stopwatch
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import cut_window
from workers.training.window import Clipping, LossScale, Window, at_safe_loss_scale

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def gradient(model: Any, data: Window64, groups: list[list[int]]) -> Tensor:
    """The gradient that a window leaves, as one vector."""
    window = Window(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0), Clipping(None))
    window.open(denominator=data.targets)
    for group in groups:
        window.add(loss_sum(model, data.batch(group)))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


@cache
def cached_model(family: str, dtype: torch.dtype) -> Any:
    return make_model(family, dtype)


_whole: dict[tuple[str, torch.dtype], Tensor] = {}


def whole_batch(family: str, dtype: torch.dtype, data: Window64) -> Tensor:
    """The same batch's gradient written out by hand, without the window: masks, one mean, one backward."""
    if (family, dtype) not in _whole:
        model = cached_model(family, dtype)
        model.zero_grad(set_to_none=True)
        batch = data.batch(list(range(64)))
        mask = torch.tensor([[i < length for i in range(max(data.lengths))] for length in data.lengths])
        logits = model(input_ids=batch.input_ids, attention_mask=mask.long()).logits
        log_p = torch.log_softmax(logits, -1)
        picked = log_p.flatten(0, 1)[batch.target_positions].gather(-1, batch.targets.unsqueeze(-1))
        (-picked.sum() / len(batch.targets)).backward()
        _whole[family, dtype] = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    return _whole[family, dtype]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("family", "dtype"), [(f, dtype) for f in PLAIN for dtype in TOLERANCE if promised(f, dtype)], ids=str
)
@pytest.mark.parametrize(
    "cut",
    [FixedCount(micro_batches=64), FixedSize(samples=8), FixedCount(micro_batches=7), TokenBudget(tokens=60),
     TokenBudget(tokens=333), TokenBudget(tokens=10_000)],
    ids=str,
)  # fmt: skip
def test_every_cut_gives_the_whole_batch_s_gradient(
    family: str, dtype: torch.dtype, cut: Any, window64: Window64
) -> None:
    groups = cut_window(window64.lengths, cut)
    split = gradient(cached_model(family, dtype), window64, groups)
    assert relative(split, whole_batch(family, dtype, window64)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("family", PLAIN)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_window_split_any_way_gives_the_same_gradient(
    family: str, data: st.DataObject, window64: Window64
) -> None:
    dtype = data.draw(st.sampled_from([dtype for dtype in TOLERANCE if promised(family, dtype)]))
    order = data.draw(st.permutations(range(64)))
    edges = sorted(data.draw(st.sets(st.integers(1, 63), max_size=63)))
    groups = [order[a:b] for a, b in zip([0, *edges], [*edges, 64], strict=True)]
    split = gradient(cached_model(family, dtype), window64, groups)
    assert relative(split, whole_batch(family, dtype, window64)) <= TOLERANCE[dtype]


def test_a_mean_of_means_differs_from_the_window_s_gradient(window64: Window64) -> None:
    """The usual way, for comparison: it is wrong by far more than rounding on this very window."""
    model = cached_model("gpt2", torch.float64)
    model.zero_grad(set_to_none=True)
    groups = cut_window(window64.lengths, FixedSize(samples=8))
    for group in groups:
        batch = window64.batch(group)
        (loss_sum(model, batch) / len(batch.targets) / len(groups)).backward()
    usual = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(usual, whole_batch("gpt2", torch.float64, window64)) > 1e-3


@pytest.mark.parametrize(("family", "optimizer"), [("gpt2", "AdamW"), ("llama", "AdamW"), ("opt", "AdamW")])
def test_ten_steps_end_in_the_same_weights_for_accumulation_1_4_and_16(
    family: str, optimizer: str, window64: Window64
) -> None:
    """The distance between the runs, relative to the distance that training covered.

    In fp64: Adam divides a gradient by its own size, so that where that is next to nothing, or a ReLU is at
    its kink, the last bit of fp32 becomes a whole step of a weight.
    """

    def train(steps: int) -> tuple[Tensor, Tensor]:
        model = make_model(family, torch.float64, seed=1)
        initial = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, fused=True)
        window = Window(model.parameters(), chosen, Clipping(1.0))
        for _ in range(10):
            window.open(denominator=window64.targets)
            for group in cut_window(window64.lengths, FixedCount(micro_batches=steps)):
                window.add(loss_sum(model, window64.batch(group)))
            assert window.close().applied
        return initial, torch.cat([p.detach().flatten() for p in model.parameters()])

    initial, once = train(1)
    for steps in (4, 16):
        other = train(steps)[1]
        assert float((other - once).norm() / (once - initial).norm()) <= 1e-9


def test_the_logged_loss_is_the_one_trained_and_the_norm_the_true_one(window64: Window64) -> None:
    model = make_model("llama", torch.float64)
    window = Window(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0), Clipping(1e-3))
    window.open(denominator=window64.targets)
    for group in cut_window(window64.lengths, FixedSize(samples=8)):
        window.add(loss_sum(model, window64.batch(group)))
    true_norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    closed = window.close()
    whole = loss_sum(model, window64.batch(list(range(64)))) / window64.targets
    assert closed.loss == pytest.approx(whole.item(), rel=1e-12)
    assert closed.grad_norm == pytest.approx(true_norm.item(), rel=1e-12)


def quadratic() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_clipping_by_norm_happens_after_accumulation() -> None:
    weight, optimizer = quadratic()
    window = Window([weight], optimizer, Clipping(1.0))
    window.open(denominator=1)
    for _ in range(2):
        window.add(0.25 * (weight**2).sum())
    closed = window.close()
    assert closed.grad_norm == pytest.approx(5.0)
    assert torch.allclose(weight, torch.tensor([3.0 - 0.6, 4.0 - 0.8]), atol=1e-5)


def test_clipping_each_micro_batch_clips_the_running_sum() -> None:
    weight, optimizer = quadratic()
    window = Window([weight], optimizer, Clipping(1.0, "each_micro_batch"))
    window.open(denominator=1)
    window.add(0.5 * (weight**2).sum())
    assert weight.grad is not None
    assert float(weight.grad.norm()) == pytest.approx(1.0, abs=1e-5)
    window.add(0.5 * (weight**2).sum())
    assert float(weight.grad.norm()) == pytest.approx(1.0, abs=1e-5)


def test_clipping_by_value() -> None:
    weight, optimizer = quadratic()
    window = Window([weight], optimizer, Clipping(3.5, "value"))
    window.open(denominator=1)
    window.add(0.5 * (weight**2).sum())
    window.close()
    assert weight.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_window_that_is_not_finite_leaves_everything_untouched(poison: float, window64: Window64) -> None:
    model = make_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    window = Window(model.parameters(), optimizer, Clipping(1.0))

    def one_window(factor: float) -> bool:
        window.open(denominator=window64.targets)
        for number, group in enumerate(cut_window(window64.lengths, FixedSize(samples=16))):
            window.add(loss_sum(model, window64.batch(group)) * (factor if number == 1 else 1.0))
        return window.close().applied

    assert one_window(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    assert not one_window(poison)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = [v for s in optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert one_window(1.0)


def test_an_fp16_overflow_halves_the_scale_and_requests_a_replay() -> None:
    weight, optimizer = quadratic()
    scale = LossScale(2.0**127)
    window = Window([weight], optimizer, Clipping(None), scale)
    window.open(denominator=1)
    window.add(0.5 * (weight**2).sum())
    closed = window.close()
    assert (closed.applied, closed.overflow, scale.value) == (False, True, 2.0**126)
    assert weight.tolist() == [3.0, 4.0]
    scale.value = 1024.0
    window.open(denominator=1)
    window.add(0.5 * (weight**2).sum())
    closed = window.close()
    assert closed.applied
    assert closed.grad_norm == pytest.approx(5.0)
    assert weight.tolist() == [0.0, 0.0]


def test_a_non_finite_loss_is_not_an_overflow() -> None:
    weight, optimizer = quadratic()
    window = Window([weight], optimizer, Clipping(None), LossScale(1024.0))
    window.open(denominator=1)
    window.add((weight * float("nan")).sum())
    closed = window.close()
    assert (closed.applied, closed.overflow) == (False, False)


def test_a_non_finite_window_does_not_lower_the_loss_scale() -> None:
    weight, optimizer = quadratic()
    scale = LossScale(1024.0)
    window = Window([weight], optimizer, Clipping(None), scale)
    for _ in range(20):
        window.open(denominator=1)
        window.add((weight.sum() - 7.0).abs().sqrt().sum())  # a finite loss of an infinite slope
        closed = window.close()
        assert not closed.applied
        if not closed.overflow:
            break
    assert not closed.overflow
    assert scale.value == 1024.0


def test_the_scale_grows_back_after_enough_good_windows() -> None:
    scale = LossScale(8.0, windows_to_grow=3)
    assert scale.value_before_window == 8.0
    for _ in range(3):
        scale.record_success()
    assert scale.value == 16.0
    for _ in range(9):
        scale.overflowed()
    assert scale.value == 1.0
    assert scale.value_before_window == 16.0  # in a checkpoint: a resume repeats the whole window


def test_a_window_without_targets_cannot_be_opened() -> None:
    weight, optimizer = quadratic()
    with pytest.raises(ValueError, match="denominator must be above 0"):
        Window([weight], optimizer, Clipping(None)).open(denominator=0)


def test_a_hook_on_the_loss_sees_every_forward_pass(window64: Window64) -> None:
    loss, seen = TokenLoss(make_model("gpt2")), []
    loss.register_forward_hook(lambda module, inputs, output: seen.append(output.loss_sum.item()))
    loss(window64.batch([0, 1]))
    assert len(seen) == 1
    assert seen[0] > 0
    assert {name for name, _ in loss.named_parameters()} == {
        f"model.{name}" for name, _ in loss.model.named_parameters()
    }


class LaggingWatch(Stopwatch):
    """A stopwatch like a GPU's: the device reaches the marks later."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.steps, self.counts = 0, False

    @property
    def lags(self) -> bool:
        return True

    def begin(self) -> None:
        self.steps += 1
        self.counts = True

    def end(self) -> None:
        """The device gets there on its own."""

    def reset(self) -> None:
        self.counts = False

    def seconds(self) -> float:
        return float(self.steps) if self.counts else 0.0


def test_the_optimizer_s_time_on_a_gpu_is_that_of_the_step_within_the_window() -> None:
    layer = torch.nn.Linear(3, 1)
    window = Window(layer.parameters(), torch.optim.SGD(layer.parameters(), lr=0.1))
    window._optimizer_watch = LaggingWatch()
    seconds = []
    for factor in (1.0, 1.0, float("nan"), 1.0, 1.0):
        window.open(denominator=1.0)
        window.add(layer(torch.ones(1, 3)).sum() * factor)
        seconds.append(window.close().optimizer_seconds)
    assert seconds == [0.0, 1.0, 2.0, 0.0, 3.0]


def test_a_safe_loss_scale_ends_with_the_block() -> None:
    scale = LossScale(65536.0)
    with at_safe_loss_scale(scale):
        assert scale.value == 256.0
    assert scale.value == 65536.0
    low = LossScale(2.0)
    with at_safe_loss_scale(low), at_safe_loss_scale(None):
        assert low.value == 2.0
