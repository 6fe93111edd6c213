"""Micro-batch sizes measured during a run: what the sweep finds, and that it does not change the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.contract.reports import Tuning
from app.contract.spec import Tune
from tests.harness.runs import create_run, events_of, log_of, small_data
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end, scale_losses, weights
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training import fit
from workers.training.micro_batches import first_steps_tuning
from workers.training.reporting.trackers import Trackers
from workers.training.start import start
from workers.training.training_run import TrainingRun


def lay(folder: Path, tune: Tune | None, steps: int = 6) -> RunDirectory:
    return create_run(folder, make_spec(data=small_data(), max_steps=steps, tune=tune))


@contextmanager
def settled(run: RunDirectory) -> Iterator[TrainingRun]:
    """A run after its first steps."""
    assignment = run.assignment()
    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False)
        for _ in range(first_steps_tuning.AFTER_STEPS):
            fit.advance(training)
        yield training
        training.loader.close()


def tensors(training: TrainingRun) -> list[torch.Tensor]:
    moments = [value for own in training.replica.optimizer.state.values() for value in own.values()]
    return [value.clone() for value in [*training.replica.model.state_dict().values(), *moments]]


def test_a_sweep_leaves_everything_as_it_was_bit_by_bit(tmp_path: Path) -> None:
    with settled(lay(tmp_path / "run", "first")) as training:
        before, state = tensors(training), training.state.to_json()
        tuning = first_steps_tuning.measure_sizes(training)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(training), strict=True))
        assert training.state.to_json() == state
        assert all(parameter.grad is None for parameter in training.replica.model.parameters())
    assert len({tried.micro_batches for tried in tuning.tried}) == len(tuning.tried) > 2
    budgets = [tried.token_budget for tried in tuning.tried]
    assert budgets == sorted(budgets, reverse=True)
    assert tuning.token_budget in budgets
    assert all(tried.largest_tokens <= tried.token_budget for tried in tuning.tried)
    assert all(tried.samples_per_second > 0 and tried.peak_bytes > 0 for tried in tuning.tried)


def test_a_tuned_run_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tuned = lay(tmp_path / "plain", None), lay(tmp_path / "tuned", "first")
    run_to_end(plain)
    monkeypatch.setattr(
        first_steps_tuning, "smallest_of_the_fastest", lambda pairs: min(tokens for tokens, _ in pairs)
    )
    run_to_end(tuned)
    (event,) = [event for event in events_of(tuned) if event["type"] == "tuned"]
    assert Tuning.model_validate(event["data"]).token_budget < 512
    assert log_of(tuned)[-1]["micro_step"] > log_of(plain)[-1]["micro_step"]
    for a, b in zip(log_of(plain), log_of(tuned), strict=True):
        assert (a["samples"], a["tokens"], a["epoch"]) == (b["samples"], b["tokens"], b["epoch"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_a_sweep_that_confirms_the_plan_does_not_change_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tuned = lay(tmp_path / "plain", None), lay(tmp_path / "tuned", "first")
    run_to_end(plain)
    monkeypatch.setattr(first_steps_tuning, "smallest_of_the_fastest", lambda pairs: 512)
    run_to_end(tuned)
    assert log_of(plain) == log_of(tuned)
    assert all(torch.equal(value, weights(tuned)[name]) for name, value in weights(plain).items())


def test_a_size_that_does_not_fit_is_excluded_from_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with settled(lay(tmp_path / "run", "first")) as training:
        limit = 300

        def failing(batch: Any) -> float:
            if batch.input_ids.numel() > limit:
                raise torch.OutOfMemoryError("injected")
            return 1.0

        scale_losses(monkeypatch, failing)
        tuning = first_steps_tuning.measure_sizes(training)
    assert tuning.tried
    assert all(tried.largest_tokens <= limit for tried in tuning.tried)


def test_tune_only_saves_no_model(tmp_path: Path) -> None:
    run = lay(tmp_path / "run", "only", steps=1)
    outcome = run_to_end(run)
    assert outcome.tuning is not None
    assert outcome.steps == first_steps_tuning.AFTER_STEPS
    assert outcome.files == ()
    assert not run.model.exists()


@given(st.integers(1, 5000), st.integers(1, 20000), st.lists(st.integers(1, 600), min_size=1, max_size=80))
def test_candidates_keep_within_memory_and_make_sense_for_the_window(
    planned: int, most: int, lengths: list[int]
) -> None:
    found = first_steps_tuning.candidates(planned, most, np.asarray(lengths))
    longest = max(lengths)
    assert found == sorted(set(found), reverse=True)
    assert all(longest <= budget <= max(longest, most) for budget in found)
    assert all(budget <= max(longest, longest * len(lengths)) for budget in found)
