from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contract.reports import NoiseScale
from app.contract.spec import RampSpec, Spec
from tests.harness.specs import make_spec
from workers.training.checkpoints.state import Position, Progress, Ramp, RunState
from workers.training.ramp import LOOK_BACK, batch_now, steps_total, update


def ramped(name: str, **changes: Any) -> Spec:
    ramp = {"name": name, "warmup_steps": 0, "loss_variance_threshold": 0.01, "max_effective_batch_size": 100}
    return make_spec(ramp=RampSpec.model_validate({**ramp, **changes}), max_steps=None, epochs=3)


def walked(spec: Spec, samples: int) -> int:
    """Steps of a run, counted by walking through it."""
    state, epochs = RunState(), spec.epochs or 0
    while state.position.epoch < epochs:
        state.position.advance(batch_now(spec, state), samples)
        state.progress.step += 1
    return state.step


@given(
    samples=st.integers(1, 300),
    warmup=st.integers(1, 400),
    batch=st.integers(1, 70),
    epochs=st.integers(1, 6),
)
def test_the_steps_of_a_linear_ramp_are_known_before(
    samples: int, warmup: int, batch: int, epochs: int
) -> None:
    changed = {"effective_batch_size": batch, "epochs": epochs}
    spec = ramped("linear", warmup_steps=warmup).model_copy(update=changed)
    assert spec.steps_for(samples) == walked(spec, samples)


def test_a_ramp_of_a_million_steps_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service counts steps in the thread that all submissions share."""
    looked_at = []
    batch_at = Spec.batch_at
    monkeypatch.setattr(Spec, "batch_at", lambda spec, step: looked_at.append(step) or batch_at(spec, step))
    changed = {"effective_batch_size": 1, "epochs": 10_000}
    spec = ramped("linear", warmup_steps=1_000_000).model_copy(update=changed)
    assert spec.steps_for(100) == 1_000_000
    assert len(looked_at) < 10


def test_a_linear_ramp_rises_to_the_full_batch_and_stays_there() -> None:
    spec = ramped("linear", warmup_steps=4)
    assert [spec.batch_at(step) for step in range(6)] == [4, 7, 10, 13, 16, 16]


def noise(value: float, high: float | None = 1e9) -> NoiseScale:
    return NoiseScale(value=value, low=0.0, high=high, measurements=20)


def test_a_batch_that_follows_the_noise_at_most_doubles_and_stays_in_its_bounds() -> None:
    spec, state = ramped("noise_scale"), RunState()
    for measured, expected in ((500, 32), (500, 64), (500, 100), (60, 60), (1, 30), (1, 16), (1, 16)):
        update(spec, state, noise(measured))
        assert batch_now(spec, state) == expected
    update(spec, state, noise(500, high=None))  # not told from zero: not followed
    assert batch_now(spec, state) == 16


def test_a_batch_doubles_while_the_losses_vary() -> None:
    spec, state = ramped("loss_variance"), RunState()
    sizes = []
    for step in range(4 * LOOK_BACK):
        state.losses.recent.append(3.0 + (step % 2 if step < 2 * LOOK_BACK else 0.0))
        update(spec, state, None)
        sizes.append(batch_now(spec, state))
    assert sizes[LOOK_BACK - 2] == 16
    assert sizes[LOOK_BACK - 1] == 32
    assert sizes[2 * LOOK_BACK - 1] == 64
    assert sizes[-1] == 64


def test_remaining_steps_are_estimated_from_the_current_batch() -> None:
    spec = ramped("noise_scale")
    assert steps_total(spec, RunState(), 160) == 30
    assert steps_total(spec, at(step=10, epoch=1), 160) == 10 + 2 + 2
    assert steps_total(spec, at(step=14, epoch=3), 160) == 14


def at(step: int, epoch: int) -> RunState:
    """Where a run stands whose batch has grown to 80."""
    return RunState(progress=Progress(step=step), position=Position(epoch=epoch), ramp=Ramp(batch=80))
