"""What an evaluation computes from a micro-batch, and what follows from a validation loss."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.contract.spec import EarlyStopping
from tests.harness.small_models import make_model, make_window64
from workers.training.checkpoints.state import RunState
from workers.training.losses.loss import TokenLoss
from workers.training.models.precision import autocast
from workers.training.reporting.evaluation import Evaluated, record


def noted(losses: list[float], patience: EarlyStopping | None) -> tuple[RunState, list[bool]]:
    state, better = RunState(), []
    for step, loss in enumerate(losses, start=1):
        state.progress.step = step
        better.append(record(state, Evaluated(loss, 0.5), patience))
    return state, better


def test_the_lowest_loss_counts_as_best_even_if_the_gain_is_tiny() -> None:
    state, better = noted([5.4705, 5.3285], EarlyStopping(patience=5, min_delta=0.5))
    assert better == [True, True]
    assert (state.evaluations.best_step, state.evaluations.best_loss) == (2, 5.3285)
    assert state.evaluations.without_gain == 1


def test_small_gains_that_add_up_reset_patience() -> None:
    state, _ = noted([5.0, 4.7, 4.4, 4.1], EarlyStopping(patience=3, min_delta=0.5))
    assert not state.progress.stopped_early
    assert state.evaluations.best_step == 4


def test_training_stops_after_patience_evaluations_without_gain() -> None:
    state, _ = noted([5.0, 4.9, 4.8, 4.7], EarlyStopping(patience=3, min_delta=0.5))
    assert state.progress.stopped_early
    assert state.evaluations.best_step == 4


def test_a_loss_that_is_not_finite_leaves_no_older_figures() -> None:
    state, better = noted([5.0, nan, inf], EarlyStopping(patience=2, min_delta=0.0))
    own = state.evaluations
    assert better == [True, False, False]
    assert (own.loss, own.token_accuracy, own.exact_match, own.at_step) == (None, None, None, 3)
    assert (own.best_loss, own.best_step) == (5.0, 1)
    assert state.progress.stopped_early


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_evaluation_counts_the_targets_that_are_most_likely(
    family: str, weighted: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.training.models.head.rows_of_chunk", lambda *_: 7)
    model = make_model(family, torch.float64).eval()
    loss = TokenLoss(model, smoothing=0.3, chunked=chunked)
    batch = make_window64().batch([3, 8, 21])
    weights = torch.linspace(0.0, 2.0, len(batch.targets)) if weighted else None
    batch = replace(batch, weights=weights)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.target_positions]
        found = loss(batch, evaluates=True)
    each = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    right = (logits.argmax(-1) == batch.targets).double()
    counts = 1.0 if weights is None else weights
    assert float(found.loss_sum) == pytest.approx(float((each * counts).sum()), rel=1e-9)
    assert float(found.correct) == pytest.approx(float((right * counts).sum()), rel=1e-9)


class Conversions(TorchDispatchMode):
    """Counts the conversions of tensors of a shape to another precision."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.found = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def test_the_chunks_of_an_evaluation_share_one_converted_output_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with gradient checkpointing, with which other converted weights are not kept."""
    monkeypatch.setattr("workers.training.models.head.rows_of_chunk", lambda *_: 7)
    model = make_model("llama", torch.float32).eval()
    batch, loss = make_window64().batch([3, 8, 21]), TokenLoss(model)
    assert len(batch.targets) > 2 * 7
    with Conversions(model.lm_head.weight.shape) as head, autocast("bf16", "cpu", keeps_copies=False):
        loss(batch, evaluates=True)
        assert not torch.is_autocast_cache_enabled()
    assert head.found == 1
