"""The measured noise scale against problems whose true one is known."""

from pathlib import Path

import numpy as np
import pytest
import torch

from app.contract.plan import TokenBudget
from tests.harness.runs import create_run, events_of, small_data, write_texts
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from tests.harness.training import run_to_end
from workers.training.data.preparation import Samples
from workers.training.gradients.noise_scale import MIN_MEASUREMENTS, Measurement, estimate
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, collate
from workers.training.models import base_model
from workers.training.window import Window


def measured_on_a_quadratic(
    distance: float, windows: int, first: int = 4, batch: int = 32
) -> list[list[float]]:
    """Samples ξ around μ with unit variance in 40 dimensions; the loss of one is |w - ξ|² / 2."""
    random = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.full((40,), distance, dtype=torch.float64))
    window = Window([weight], torch.optim.SGD([weight], lr=0.0))
    found = []
    for _ in range(windows):
        samples = torch.randn(batch, 40, generator=random, dtype=torch.float64)
        window.open(batch)
        for number, part in enumerate((samples[:first], samples[first:])):
            window.add(0.5 * (weight - part).square().sum())
            if number == 0:
                window.record_first_norm()
        closed = window.close()
        assert closed.first_norm is not None
        found.append(Measurement(closed.first_norm, first, first, closed.grad_norm, batch, batch).packed())
    return found


@pytest.mark.parametrize("true", [10.0, 60.0])
def test_on_a_quadratic_the_estimate_equals_the_true_noise_scale(true: float) -> None:
    """tr(Σ) = 40 and |G|² = 40 d², so that the noise scale is 1 / d²."""
    found = estimate(measured_on_a_quadratic(distance=true**-0.5, windows=600))
    assert found is not None
    assert found.high is not None
    print(f"noise scale: measured {found.value:.2f}, true {true:.2f}")
    assert found.value == pytest.approx(true, rel=0.15)
    assert found.low < true < found.high


@pytest.mark.thorough
def test_the_confidence_interval_covers_the_true_value_about_90_percent_of_the_time() -> None:
    everything = measured_on_a_quadratic(distance=0.2, windows=4000)
    held = 0
    for start in range(0, 4000, 100):
        found = estimate(everything[start : start + 100])
        held += found is not None and found.low <= 25.0 and (found.high is None or found.high >= 25.0)
    assert 32 <= held <= 40


def test_few_measurements_or_pure_noise_give_no_bounded_estimate() -> None:
    assert estimate(measured_on_a_quadratic(0.2, MIN_MEASUREMENTS - 1)) is None
    found = estimate(measured_on_a_quadratic(distance=0.0, windows=50))
    assert found is None or found.high is None


def true_noise_scale(run_folder: Path) -> float:
    """From each sample's own gradient g and targets n: the mean of |g - n·G|² over n̄²|G|²."""
    run = create_run(run_folder)
    assignment = run.assignment()
    model, tokenizer, _ = base_model.load(assignment, base_model.stage_base_model(assignment, run))
    samples = Samples(run_folder / "data")
    loss = TokenLoss(model)
    counts = samples.targets.astype(float)
    squares, total, weighted = 0.0, torch.zeros(()), torch.zeros(())
    for sample, count in enumerate(counts):
        model.zero_grad(set_to_none=True)
        loss(collate([samples.read(sample)], BatchLayout(tokenizer.pad_token_id))).loss_sum.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        squares += float(gradient.square().sum())
        total, weighted = total + gradient, weighted + count * gradient
    mean = total / counts.sum()
    size = float(mean.square().sum())
    noise = squares / len(counts) - 2 * float(mean @ weighted) / len(counts) + np.mean(counts**2) * size
    return float(noise / (counts.mean() ** 2 * size))


@pytest.mark.thorough
def test_on_texts_of_unequal_length_the_estimate_matches_per_sample_gradients(tmp_path: Path) -> None:
    """The trainer itself, at a learning rate that moves nothing."""
    write_texts(tmp_path / "data.jsonl", 500)
    spec = make_spec(
        data=small_data(examples=500), max_steps=60, effective_batch_size=48, noise_scale_every=1,
        optimizer=make_optimizer("sgd", 1e-12), schedule=make_schedule("constant"), save_every=1000,
    )  # fmt: skip
    run = create_run(tmp_path / "run", spec, rule=TokenBudget(tokens=300))
    outcome = run_to_end(run)
    assert outcome.noise_scale is not None
    true = true_noise_scale(tmp_path / "run")
    print(f"noise scale: measured {outcome.noise_scale.value:.3f}, true {true:.3f}")
    assert outcome.noise_scale.value == pytest.approx(true, rel=0.15)
    assert outcome.noise_scale.measurements == 60
    assert "noise_scale" in {event["type"] for event in events_of(run)}
