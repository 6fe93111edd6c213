import pytest
import torch
from transformers import (
    TrainingArguments,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from app.jobs.training_config import TrainingConfig
from app.submissions.optimizer import schedule_spec
from tests.harness.specs import make_schedule
from workers.training.schedule import rate_factor


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_values_are_transformers_own(name: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup, 30),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, warmup, 30),
    }[name]()
    schedule = make_schedule(name, warmup_steps=warmup)
    for step in range(30):
        assert rate_factor(schedule, step, 30) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_warmup_as_a_share_of_the_steps() -> None:
    assert make_schedule("linear", warmup_ratio=0.1).warmup(55) == 5, "of a job of an earlier version"
    for steps, share in ((10, 0.03), (30, 0.05), (55, 0.1), (100, 0.29), (200, 0.57), (100, 0.0)):
        theirs = TrainingArguments(warmup_steps=share, output_dir="unused").get_warmup_steps(steps)
        own = schedule_spec(TrainingConfig(warmup_ratio=share, lr_scheduler="linear"))
        assert own.warmup(steps) == theirs, (steps, share)


@pytest.mark.parametrize("steps", [10, 37, 100])
@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_one_cycle_is_pytorchs(steps: int, share: float) -> None:
    from torch.optim import SGD
    from torch.optim.lr_scheduler import OneCycleLR

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=0.1)
    theirs = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps, pct_start=share, cycle_momentum=False)
    schedule = make_schedule("one_cycle", pct_start=share)
    for step in range(steps):
        assert 0.1 * rate_factor(schedule, step, steps) == pytest.approx(
            optimizer.param_groups[0]["lr"], abs=1e-9
        )
        optimizer.step()
        if step + 1 < steps:
            theirs.step()


@pytest.mark.parametrize(
    ("shape", "start", "expected"),
    [("linear", 0.2, [0.2, 0.4, 0.6, 0.8]), ("quadratic", 0.0, [0.0, 1 / 16, 1 / 4, 9 / 16]),
     ("constant", 0.1, [0.1] * 4)],
)  # fmt: skip
def test_the_shapes_of_a_warmup(shape: str, start: float, expected: list[float]) -> None:
    schedule = make_schedule("linear", warmup_steps=4, warmup_shape=shape, warmup_start=start, final=0.5)
    assert [rate_factor(schedule, step, 8) for step in range(4)] == pytest.approx(expected)
    assert rate_factor(schedule, 4, 8) == 1.0
    assert rate_factor(schedule, 8, 8) == 0.5


def test_one_cycle_that_rises_in_no_step_begins_at_its_peak() -> None:
    """0.1 × 10 updates, where PyTorch's divides by zero."""
    assert rate_factor(make_schedule("one_cycle", pct_start=0.1), 0, 10) == 1.0
