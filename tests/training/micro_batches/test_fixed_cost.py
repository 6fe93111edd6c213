"""What a micro-batch costs besides its tokens: measured from the times of micro-batches, and used in cuts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contract.plan import TokenBudget
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.training import accumulate
from workers.training.devices.stopwatch import Lap
from workers.training.micro_batches import batches, fixed_cost
from workers.training.micro_batches.fixed_cost import fixed_cost_of
from workers.training.micro_batches.trial_policy import Bounds, Measured, Tuner


def laps_of(sizes: list[int], start: float, per_token: float, noise: float = 0.0) -> list[Lap]:
    random = np.random.default_rng(5)
    return [Lap(size, (start + per_token * size) * (1 + noise * random.uniform(-1, 1))) for size in sizes]


@given(
    st.lists(st.integers(16, 10**5), min_size=8, max_size=40).filter(lambda all_: max(all_) > 2 * min(all_)),
    st.floats(1e-3, 1.0),
    st.floats(1e-7, 1e-3),
)
def test_it_is_found_exactly_without_noise(sizes: list[int], start: float, per_token: float) -> None:
    assert fixed_cost_of(laps_of(sizes, start, per_token)) == pytest.approx(start / per_token, rel=1e-3)


def test_slow_micro_batches_do_not_count() -> None:
    sizes = list(range(1000, 9000, 250))
    laps = laps_of(sizes, 0.05, 1e-5, noise=0.05)
    laps[3] = laps[3]._replace(seconds=2.0)
    laps[20] = laps[20]._replace(seconds=1.0)
    assert fixed_cost_of(laps) == pytest.approx(5000, rel=0.35)


def test_it_is_limited_at_both_ends() -> None:
    sizes = list(range(1000, 9000, 500))
    assert fixed_cost_of(laps_of(sizes, 0.05, 0.0)) == fixed_cost.MOST  # tokens cost nothing
    assert fixed_cost_of(laps_of(sizes, 0.0, 1e-5)) == 1.0
    assert fixed_cost_of([Lap(size, 1e-9 * size**2) for size in sizes]) == 1.0  # long ones cost far more


def test_alike_or_few_micro_batches_tell_nothing() -> None:
    assert fixed_cost_of(laps_of([1000] * 20, 0.05, 1e-5)) is None
    assert fixed_cost_of(laps_of([1000, 9000], 0.05, 1e-5)) is None
    assert fixed_cost_of([]) is None


RULE = TokenBudget(tokens=1000)
"""A whole window fits into one micro-batch."""


def create(folder: Path, attempt: int = 1, steps: int = 30, **changes: Any) -> RunDirectory:
    fields = {"data": small_data(), "tune": "while_training", "max_steps": steps, **changes}
    return create_run(folder, make_spec(**fields), attempt=attempt, rule=RULE)


def pretend(monkeypatch: pytest.MonkeyPatch, start: float, per_token: float) -> None:
    """Lets the device measure micro-batches one by one, and take this long for them."""
    honest = accumulate.accumulate

    def accumulated(training: Any, window: Any, groups: Any, *given: Any, **named: Any) -> Any:
        cost = honest(training, window, groups, *given, **named)
        lengths = training.loader.samples.lengths[window]
        sizes = [int(lengths[group].max()) * len(group) for group in groups[0]]
        return replace(cost, laps=lambda: tuple(laps_of(sizes, start, per_token)))

    monkeypatch.setattr(accumulate, "accumulate", accumulated)


def micro_batches(run: RunDirectory) -> list[int]:
    done = [line["micro_step"] for line in raw_log(run)]
    return np.diff([0, *done]).tolist()


@pytest.mark.parametrize(
    ("start", "fewer"), [(10.0, True), pytest.param(0.0, False, marks=pytest.mark.thorough)]
)
def test_windows_are_cut_by_the_measured_cost_and_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: float, fewer: bool
) -> None:
    if fewer:
        monkeypatch.setattr(batches, "_FIXED_COST", 0.01)  # far too little is assumed
    plain = create(tmp_path / "plain", tune=None)
    run_to_end(plain)
    pretend(monkeypatch, start, 1e-4)
    run = create(tmp_path / "run")
    run_to_end(run)
    ours, theirs = micro_batches(run), micro_batches(plain)
    assert ours[: fixed_cost.WINDOWS] == theirs[: fixed_cost.WINDOWS]
    later, assumed = sum(ours[10:]), sum(theirs[10:])
    assert later < assumed if fewer else later > assumed
    reported = events_of_kind(run, "fixed_cost")
    assert reported
    assert reported[0]["data"]["tokens"] == pytest.approx(start / 1e-4 if fewer else 1.0, rel=0.01)
    for one, other in zip(raw_log(run), raw_log(plain), strict=True):
        assert (one["samples"], one["tokens"]) == (other["samples"], other["tokens"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.thorough
def test_a_stopped_run_cuts_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 10.0, 1e-4)
    whole, stopped = create(tmp_path / "whole"), create(tmp_path / "stopped")
    run_to_end(whole)
    interrupted_at(stopped, sum(micro_batches(whole)[:12]))
    assert len(raw_log(stopped)) < 30
    create(tmp_path / "stopped", attempt=2)
    run_to_end(stopped)
    assert micro_batches(stopped) == micro_batches(whole)
    ours, theirs = weights(stopped), weights(whole)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_without_tuning_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 10.0, 1e-4)
    run = create(tmp_path / "run", tune=None)
    run_to_end(run)
    assert not events_of_kind(run, "fixed_cost")


def test_many_micro_batches_are_measured_by_some_of_them() -> None:
    sizes = np.random.default_rng(1).integers(100, 10_000, 200_000).tolist()
    laps = [Lap(size, 0.05 + 1e-5 * size) for size in sizes]
    assert len(fixed_cost.thinned(laps)) == 256
    assert fixed_cost_of(laps) == pytest.approx(5000, rel=1e-3)


@pytest.mark.parametrize("changes", [{"profile": True}, {"data": small_data(packing=True)}], ids=str)
def test_what_would_mislead_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A window under the profiler, and packed rows, which are not cut by cost."""
    seen: dict[int, bool] = {}
    honest = Tuner.record_window

    def noted(self: Tuner, step: int, window: Measured, bounds: Bounds) -> bool:
        seen[step] = bool(window.laps)
        return honest(self, step, window, bounds)

    monkeypatch.setattr(Tuner, "record_window", noted)
    pretend(monkeypatch, 10.0, 1e-4)
    run_to_end(create(tmp_path / "run", steps=6, **changes))
    assert seen[3] is False
    assert seen[5] is ("profile" in changes)
