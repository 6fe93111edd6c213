import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tests.specs import make_schedule
from workers.training.schedule import rate_factor, warmup_of


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
    assert warmup_of(make_schedule("linear", warmup_ratio=0.1), 55) == 5
