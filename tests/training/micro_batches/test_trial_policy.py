"""Micro-batch sizes that are tried while training: which is kept, and that a resume repeats the decisions."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from app.contract.reports import Tuning, TuningStep
from tests.harness.runs import create_run, events_of, small_data, start_trainer, until, with_ranks
from tests.harness.specs import make_spec
from tests.harness.training import finished, interrupted_at, log_of_run, raw_log, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.training import accumulate, fit
from workers.training.checkpoints.state import VERSION, LearnedTuning, RunState, from_json
from workers.training.micro_batches import trial_policy
from workers.training.micro_batches.trial_policy import Bounds, Measured, Tuner
from workers.training.replica import Replica

BOUNDS = Bounds(planned=512, least=100, most=10**6, windows_left=10**6)
Speed = Callable[[int], float]


def after(windows: int, speed: Speed, bounds: Bounds = BOUNDS, own: Tuner | None = None) -> Tuner:
    """A tuner after windows whose speed depends on their budget alone."""
    own = own or Tuner(LearnedTuning(), adapts=True)
    for step in range(1, windows + 1):
        own.record_window(step, window_of(own, speed, bounds), bounds)
    return own


def window_of(own: Tuner, speed: Speed, bounds: Bounds = BOUNDS) -> Measured:
    budget = own.next_tokens(bounds.planned)
    return Measured(8, 1000, 4, min(budget, 700), 1000 / speed(budget))


@pytest.mark.parametrize(
    ("speeds", "kept", "tried"),
    [
        ({512: 100.0, 1024: 99.0, 256: 98.0}, 512, {256, 512, 1024}),
        ({512: 100.0, 1024: 104.0, 256: 104.0}, 512, {256, 512, 1024}),  # too little to switch
        ({512: 100.0, 1024: 120.0, 2048: 119.0}, 1024, {512, 1024, 2048}),
        ({512: 100.0, 1024: 120.0, 2048: 150.0}, 2048, {512, 1024, 2048}),  # 4,096 is too far from the plan
        ({512: 100.0, 1024: 90.0, 256: 110.0, 128: 90.0}, 256, {128, 256, 512, 1024}),
    ],
)
def test_the_fastest_size_is_kept(speeds: dict[int, float], kept: int, tried: set[int]) -> None:
    own = after(40, speeds.__getitem__)
    assert own.next_tokens(512) == kept
    found = own.result(512)
    assert found is not None
    assert found.token_budget == kept
    assert {each.token_budget: each.tokens_per_second for each in found.tried} == pytest.approx(
        {size: speeds[size] for size in tried}
    )


@pytest.mark.parametrize(
    "speed_at",
    [
        lambda step: 100.0 * 0.97**step,  # a device that slows down
        lambda step: 100.0 * 1.03**step,
        lambda step: 100.0 if step % 2 else 60.0,  # every other window differs
        lambda step: 60.0 if step % 2 else 100.0,
        lambda step: 100.0 if step % 7 else 20.0,  # something else ran meanwhile
    ],
)
def test_what_happens_to_both_sizes_does_not_change_the_size(speed_at: Speed) -> None:
    own = Tuner(LearnedTuning(), adapts=True)
    for step in range(1, 41):
        own.record_window(step, window_of(own, lambda _: speed_at(step)), BOUNDS)  # noqa: B023
    assert own.learned.trial is None
    assert own.next_tokens(512) == 512


def test_short_windows_are_not_compared() -> None:
    own = after(3, lambda size: 100.0)
    before = own.state()
    assert not own.record_window(4, window_of(own, lambda size: 1e6), replace(BOUNDS, is_comparable=False))
    assert own.state() == {**before, "windows": before["windows"] + 1}


@pytest.mark.parametrize(
    "bounds",
    [
        replace(BOUNDS, windows_left=trial_policy.WORTH_TRYING - 1),
        replace(BOUNDS, least=300, most=600),
    ],
)
def test_nothing_is_tried_where_it_cannot_gain(bounds: Bounds) -> None:
    own = after(40, lambda size: float(size), bounds)
    assert own.next_tokens(512) == 512
    assert own.result(512) is None


def test_sizes_are_tried_again_later() -> None:
    """Lengths and speeds change."""
    own = after(40, lambda size: 100.0)
    after(2 * trial_policy.FIRST_TRIALS_PERIOD, lambda size: float(size), own=own)
    assert own.next_tokens(512) == 2048


@given(
    st.dictionaries(st.sampled_from([128, 256, 512, 1024, 2048]), st.floats(1.0, 1e6), min_size=5),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_a_resume_repeats_recorded_decisions_whatever_it_measures(
    speeds: dict[int, float], checkpoint: int, crashed: int
) -> None:
    until_step = checkpoint + crashed
    first = Tuner(LearnedTuning(), adapts=True)
    recorded, budgets, saved = {}, [], LearnedTuning()
    for step in range(1, until_step + 1):
        budgets.append(first.next_tokens(512))
        if first.record_window(step, window_of(first, speeds.__getitem__), BOUNDS):
            recorded[step] = first.state()
        if step == checkpoint:
            saved = LearnedTuning(**first.state())
    again = Tuner(saved, adapts=True, recorded=recorded, until=until_step)
    repeated = []
    for step in range(checkpoint + 1, until_step + 1):
        repeated.append(again.next_tokens(512))
        assert not again.record_window(step, window_of(again, lambda size: 1e6 / size), BOUNDS)
    assert repeated == budgets[checkpoint:]
    assert again.state() == first.state()


def create(folder: Path, attempt: int = 1, steps: int = 40, **changes: Any) -> RunDirectory:
    fields = {"data": small_data(), "tune": "while_training", "max_steps": steps, **changes}
    spec = make_spec(**fields)
    return create_run(folder, spec, attempt=attempt)


def pretend(monkeypatch: pytest.MonkeyPatch, speed: Speed) -> None:
    """Makes the tuner see speeds that depend on the budget alone, in a run that is short."""
    honest = Tuner.record_window

    def record_window(self: Tuner, step: int, window: Measured, bounds: Bounds) -> bool:
        seconds = window.tokens / speed(self.next_tokens(bounds.planned))
        return honest(self, step, replace(window, seconds=seconds), bounds)

    monkeypatch.setattr(Tuner, "record_window", record_window)
    monkeypatch.setattr(trial_policy, "WORTH_TRYING", 2)


def test_a_run_keeps_the_fastest_size_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda size: 1e6 / size)  # the smaller, the faster
    tuned, plain = (
        create(tmp_path / "tuned"),
        create_run(tmp_path / "plain", make_spec(data=small_data(), max_steps=40)),
    )
    run_to_end(tuned)
    run_to_end(plain)
    (event,) = [event for event in events_of(tuned) if event["type"] == "tuned"]
    found = Tuning.model_validate(event["data"])
    assert found.token_budget < 512
    assert f"at most {found.token_budget} tokens" in event["message"]
    assert all(each.peak_bytes is None for each in found.tried)
    ours, theirs = raw_log(tuned), raw_log(plain)
    assert ours[-1]["micro_step"] > theirs[-1]["micro_step"]
    assert ours[-1]["largest_tokens"] < theirs[-1]["largest_tokens"]
    for a, b in zip(ours, theirs, strict=True):
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.thorough
def test_a_stopped_run_continues_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop writes a checkpoint in the middle of a trial; weights and decisions are those of a run that was
    not stopped."""
    pretend(monkeypatch, lambda size: 1e6 / size)
    whole, stopped = create(tmp_path / "whole"), create(tmp_path / "stopped")
    run_to_end(whole)
    interrupted_at(stopped, 20)
    at = len(raw_log(stopped))
    assert 2 < at < 14, "not within a trial"
    create(tmp_path / "stopped", attempt=2)
    run_to_end(stopped)
    assert [line["micro_step"] for line in raw_log(stopped)] == [
        line["micro_step"] for line in raw_log(whole)
    ]
    ours, theirs = weights(stopped), weights(whole)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.thorough
def test_a_killed_run_cuts_the_windows_that_it_repeats_as_before(tmp_path: Path) -> None:
    steps = trial_policy.WORTH_TRYING + 60
    run = create(tmp_path / "run", steps=steps, save_every=10**6)
    trainer = start_trainer(run)
    until(lambda: len(log_of_run(run)) >= 9)
    trainer.kill()
    trainer.wait()
    before = {line["step"]: line for line in raw_log(run)}
    assert run.tuning(), "nothing was tried"
    create(tmp_path / "run", attempt=2, steps=steps, save_every=10**6)
    finished(run)
    again = {line["step"]: line for line in raw_log(run) if line["attempt"] == 2}
    assert set(again) == set(range(1, steps + 1))
    for step, line in before.items():
        same = ("loss", "grad_norm", "micro_step", "largest_tokens")
        assert [line[name] for name in same] == [again[step][name] for name in same], step


def test_running_out_of_memory_ends_the_trials() -> None:
    own = after(5, lambda size: 100.0)
    assert own.learned.trial == 1024
    own.give_up()
    after(40, lambda size: float(size), own=own)
    assert own.next_tokens(512) == 512
    assert own.result(512) is None


def test_a_recorded_trial_does_not_begin_again_after_running_out_of_memory() -> None:
    first = after(5, lambda size: 100.0)
    again = Tuner(LearnedTuning(), adapts=False, recorded={2: first.state()}, until=5)
    for step in range(1, 6):
        again.record_window(step, window_of(again, lambda size: 100.0), BOUNDS)
        assert again.next_tokens(512) == 512


def test_no_trial_begins_with_too_few_windows_left() -> None:
    own = Tuner(LearnedTuning(), adapts=True)
    for step in range(1, 41):
        left = trial_policy.WORTH_TRYING + 9 - step
        own.record_window(step, window_of(own, lambda size: float(size)), replace(BOUNDS, windows_left=left))
    assert len(own.learned.tried) == 2


@pytest.mark.parametrize(
    "rule", [FixedCount(micro_batches=1), FixedCount(micro_batches=4), FixedSize(samples=2)], ids=str
)
def test_a_plan_without_a_budget_is_not_tuned(tmp_path: Path, rule: MicroBatchRule) -> None:
    """The planner fixes the count where a batch fits only as one micro-batch."""
    run = create(tmp_path / "run")
    with_rule(run, rule)
    run_to_end(run)
    assert not run.tuning()


@pytest.mark.thorough
def test_a_plan_for_another_device_discards_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda size: 1e6 / size)
    run = create(tmp_path / "run", steps=80)
    interrupted_at(run, 20)
    assert run.tuning()
    create(tmp_path / "run", attempt=2, steps=80)
    with_rule(run, TokenBudget(tokens=300))
    run_to_end(run)
    events = [event for event in events_of(run) if event["type"] == "tuned"]
    assert [each["token_budget"] for each in events[-1]["data"]["tried"]] == [600, 300, 150, 75]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [lambda run: with_rule(run, FixedCount(micro_batches=1)), lambda run: with_ranks(run, [0.5, 0.5])],
)
def test_a_tuned_run_goes_on_under_a_plan_that_is_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[RunDirectory], object]
) -> None:
    pretend(monkeypatch, lambda size: 1e6 / size)
    run = create(tmp_path / "run")
    interrupted_at(run, 40)
    done = len(raw_log(run))
    assert run.tuning()
    create(tmp_path / "run", attempt=2)
    change(run)
    finished(run)
    assert len(raw_log(run)) == 40
    assert all(line.step <= done for line in run.tuning())


@pytest.mark.thorough
def test_a_size_that_was_tried_when_the_process_was_killed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have killed it for lack of memory. The windows before it are cut as before."""
    pretend(monkeypatch, lambda size: float(size))
    run = create(tmp_path / "run", steps=60, save_every=10**6)
    trials = 0

    class Killed(BaseException):
        pass

    def train_window(training: Any, *given: Any) -> Any:
        nonlocal trials
        trials += training.tuner.is_on_trial
        if trials == 4:
            raise Killed
        return accumulate.train_window(training, *given)

    with monkeypatch.context() as patch:
        patch.setattr(fit, "train_window", train_window)
        patch.setattr(RunDirectory, "on_trial", on_trial_until_killed)
        with pytest.raises(Killed):
            run_to_end(run)
    before = raw_log(run)
    create(tmp_path / "run", attempt=2, steps=60, save_every=10**6)
    run_to_end(run)
    again = [line for line in raw_log(run) if line["attempt"] == 2]
    assert [line["loss"] for line in again[: len(before)]] == [line["loss"] for line in before]
    assert [line["micro_step"] for line in again[: len(before)]] == [line["micro_step"] for line in before]
    assert len(again) == 60
    assert not run.was_killed_on_trial
    assert max(line.step for line in run.tuning()) <= len(before)
    # A third attempt, also without a checkpoint, cuts all windows as the second did.
    create(tmp_path / "run", attempt=3, steps=60, save_every=10**6)
    shutil.rmtree(run.checkpoints)
    run_to_end(run)
    third = [line for line in raw_log(run) if line["attempt"] == 3]
    assert [line["micro_step"] for line in third] == [line["micro_step"] for line in again]
    assert [line["loss"] for line in third] == [line["loss"] for line in again]


@contextmanager
def on_trial_until_killed(run: RunDirectory) -> Iterator[None]:
    """As a kill would leave it."""
    (run.path / "trial").touch()
    yield
    (run.path / "trial").unlink()


@pytest.mark.thorough
def test_trials_stay_ended_in_later_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda size: float(size))
    run = create(tmp_path / "run", steps=60)
    interrupted_at(run, 12)
    (run.path / "trial").touch()
    done = len(raw_log(run))
    for attempt in (2, 3):
        create(tmp_path / "run", attempt=attempt, steps=60)
        interrupted_at(run, 20)
    create(tmp_path / "run", attempt=4, steps=60)
    run_to_end(run)
    assert len(raw_log(run)) == 60
    assert max(line.step for line in run.tuning()) <= done


@pytest.mark.thorough
def test_out_of_memory_in_a_trial_leaves_the_current_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda size: float(size))
    run = create(tmp_path / "run")
    with_rule(run, TokenBudget(tokens=128))
    honest = Replica.add

    def add(self: Replica, batch: Any) -> None:
        if batch.input_ids.numel() > 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        honest(self, batch)

    monkeypatch.setattr(Replica, "add", add)
    run_to_end(run)
    assert len([event for event in events_of(run) if event["type"] == "out_of_memory"]) == 1
    assert len(raw_log(run)) == 40
    plain = create(tmp_path / "plain", tune=None)
    with_rule(plain, TokenBudget(tokens=128))
    run_to_end(plain)
    ours, theirs = raw_log(run), raw_log(plain)
    assert [line["largest_tokens"] for line in ours[20:]] == [line["largest_tokens"] for line in theirs[20:]]


@pytest.mark.thorough
def test_decisions_survive_two_kills_within_one_checkpoint_interval(tmp_path: Path) -> None:
    """The second attempt reports earlier steps again before it is killed, too."""
    run = create(tmp_path / "run")
    lines = [LINE.format(attempt=1, step=step) for step in range(1, 31)]
    lines += [LINE.format(attempt=2, step=step) for step in range(1, 11)]
    run.metrics.write_text("".join(lines) + '{"attempt":2,"step":99')
    assert run.last_step() == 30
    for step in (5, 28, 31):
        run.append_tuning(TuningStep(step=step, state={}))
    with (run.path / "tuning.jsonl").open("a") as file:
        file.write('{"step": 3')
    run.forget_decisions(after=run.last_step())
    run.append_tuning(TuningStep(step=31, state={}))
    assert [line.step for line in run.tuning()] == [5, 28, 31]


LINE = '{{"attempt":{attempt},"step":{step},"micro_step":1}}\n'


def with_rule(run: RunDirectory, rule: MicroBatchRule) -> None:
    assignment = run.assignment()
    (rank,) = assignment.plan.ranks
    changed = rank.model_copy(update={"micro_batch_rule": rule})
    plan = assignment.plan.model_copy(update={"ranks": (changed,)})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))


@pytest.mark.thorough
def test_where_micro_batches_must_not_shrink_only_smaller_ones_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without auto_adjust_batch_size, running out of memory would end the job."""
    pretend(monkeypatch, lambda size: float(size))
    run = create(tmp_path / "run", auto_adjust_batch_size=False)
    run_to_end(run)
    tried = {each["token_budget"] for line in run.tuning() for each in line.state["tried"]}
    assert tried
    assert max(tried) == 512


def test_a_record_of_another_version_is_read_as_far_as_it_is_known() -> None:
    first = after(5, lambda size: 100.0)
    state = {**first.state(), "added_later": 1}
    state["tried"] = [{**each, "added_later": 1} for each in state["tried"]]
    del state["period"]
    again = Tuner(LearnedTuning(), adapts=True, recorded={1: state}, until=1)
    again.record_window(1, window_of(again, lambda size: 100.0), BOUNDS)
    assert again.next_tokens(512) == first.next_tokens(512)
    assert again.learned.tried == first.learned.tried


def test_a_checkpoint_keeps_the_trial() -> None:
    state = RunState(tuning=after(5, lambda size: 100.0).learned)
    assert from_json(state.to_json(), VERSION).tuning == state.tuning
    assert state.tuning.trial == 1024
