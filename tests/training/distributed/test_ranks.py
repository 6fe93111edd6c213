"""Several ranks train as one: the same gradient and the same decisions, whatever each takes of a window.

The ranks are processes on the CPU, connected by gloo (tests/harness/ranks.py).
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from app.contract.spec import GradientCompression, Strategy, ZeroStage
from tests.harness.ranked_windows import RankedWindow, accumulate
from tests.harness.ranks import Died, Ranks
from tests.harness.runs import create_run, log_of, small_data, with_ranks
from tests.harness.specs import cpu_plan, make_spec
from tests.harness.training import finished
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.training.accumulate import divide, reduce_memory
from workers.training.checkpoints.state import LearnedBudget, RunState
from workers.training.distributed import rank_launcher
from workers.training.distributed.group import Group
from workers.training.distributed.partition import partition, partition_by_length
from workers.training.exceptions import CannotTrain, InterruptionRequested, OtherRankFailed
from workers.training.micro_batches.batches import BudgetCosts, costs_of_longest, cut_window
from workers.training.micro_batches.budget import Budget
from workers.training.passes import failing_together
from workers.training.recovery.decision import Verdict

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

WINDOWS = {
    "llama": RankedWindow("llama"),
    "llama_fp32": RankedWindow("llama", torch.float32),
    "gpt2_smoothed": RankedWindow("gpt2", smoothing=0.1),
    "weighted": RankedWindow("gpt2", weighted=True, rule=FixedCount(micro_batches=3)),
    "lora": RankedWindow("llama", lora=True, rule=FixedSize(samples=5)),
    "mixture_of_experts": RankedWindow("mixtral"),
    "mixture_of_experts_weighted": RankedWindow("mixtral", weighted=True, smoothing=0.1),
    "tied_and_capped": RankedWindow("nanochat"),
    "unequal": RankedWindow("llama", shares=(1.0, 0.5, 3.0, 0.1)),
    "three_samples": RankedWindow("llama", samples=3),
    "one_sample": RankedWindow("mixtral", samples=1),
    "sums_on_the_host": RankedWindow("llama", on_cpu=True),
    "bf16_weights": RankedWindow("llama", torch.bfloat16),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as connected:
        yield connected


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Callable[[str], Any]:
    """What one rank that holds the whole model makes of a window of `DIVIDED`."""

    @cache
    def accumulated(name: str) -> Any:
        ((_, alone),) = ranks.run(1, accumulate, DIVIDED[name], {})
        return alone

    return accumulated


def abort(group: Group, marker: Path | None) -> tuple[bool, ...]:
    """Rank 1 dies by a signal: always, or if the marker is missing."""
    if group.rank == 1 and not (marker and marker.exists()):
        if marker:
            marker.touch()
        os.abort()
    return group.any(False)


def fail_on_one(group: Group, failing: int | None) -> tuple[str, list[float]]:
    """A pass over a rank's own micro-batches, which one rank does not complete, and a sum over ranks."""
    ended = "complete"
    try:
        with failing_together(group, is_sharded=False):
            if group.rank == failing:
                raise InterruptionRequested
    except InterruptionRequested:
        ended = "interrupted"
    except OtherRankFailed:
        ended = "another failed"
    return ended, group.sum([1.0])


@pytest.mark.thorough
def test_no_rank_goes_on_alone_after_a_pass_that_another_did_not_complete(ranks: Ranks) -> None:
    assert ranks.run(3, fail_on_one, None) == [("complete", [3.0])] * 3
    assert ranks.run(3, fail_on_one, 1) == [
        ("another failed", [3.0]), ("interrupted", [3.0]), ("another failed", [3.0])
    ]  # fmt: skip


@pytest.mark.thorough
def test_processes_that_die_are_replaced(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 1 died with exit code -6"):
        assert ranks.run(3, abort, tmp_path / "marker") == [(False,)] * 3
    with pytest.warns(UserWarning, match="trying again"), pytest.raises(Died):
        ranks.run(2, abort, None)
    assert ranks.run(4, abort, tmp_path / "marker") == [(False,)] * 4


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("name", WINDOWS)
def test_any_number_of_ranks_has_the_gradient_of_one(ranks: Ranks, name: str) -> None:
    window = WINDOWS[name]
    ((_, alone),) = ranks.run(1, accumulate, window, {})
    for size in (2, 3, 4):
        seen = [last for _, last in ranks.run(size, accumulate, window, {})]
        for each in seen:
            assert difference(each.gradient, alone.gradient) <= TOLERANCE.get(window.dtype, 1e-2)
            assert each.loss == pytest.approx(alone.loss, rel=TOLERANCE.get(window.dtype, 1e-2))
            assert each.verdict is Verdict.APPLY
            assert np.array_equal(each.weights, seen[0].weights), "the ranks' weights are the same bits"
            assert len(each.micro_losses) == sum(one.own_micro_batches for one in seen)
            assert sum(each.micro_losses) == pytest.approx(each.loss, rel=1e-5)


@pytest.mark.parametrize("scale", [None, 2.0**-40, 2.0**40], ids=["", "tiny", "huge"])
@pytest.mark.parametrize(("compression", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_compressed_gradients_are_rounded_twice_whatever_the_number_of_ranks(
    ranks: Ranks, compression: GradientCompression, unit: float, scale: float | None
) -> None:
    """The bound of compression.py, in the 2-norm, and nearly half of it as rounding errors do not add up."""
    ((_, alone),) = ranks.run(1, accumulate, RankedWindow("llama"), {})
    window = RankedWindow("llama", compression=compression, shares=(1.0, 0.5, 3.0, 0.1))
    errors = {}
    for size in (2, 3, 4):
        seen = [last for _, last in ranks.run(size, accumulate, window, {}, scale)]
        errors[size] = difference(seen[0].gradient, alone.gradient)
        for each in seen:
            assert np.array_equal(each.weights, seen[0].weights), "the ranks' weights are the same bits"
    assert all(unit / 100 < error < 2 * unit for error in errors.values()), errors


def test_a_compressed_window_with_a_nan_is_skipped_on_all(ranks: Ranks) -> None:
    window = RankedWindow("llama", compression="fp16")
    for first, second in ranks.run(3, accumulate, window, {1: "nan"}):
        assert first.verdict is Verdict.SKIP_NOT_FINITE
        assert second.verdict is Verdict.APPLY


def test_compressed_sums_on_the_host(ranks: Ranks) -> None:
    ((_, alone),) = ranks.run(1, accumulate, RankedWindow("llama"), {})
    window = RankedWindow("llama", on_cpu=True, compression="bf16", samples=64)
    for _, last in ranks.run(3, accumulate, window, {}):
        assert difference(last.gradient, alone.gradient) < 2**-7


DIVIDED = {
    "llama": RankedWindow("llama"),
    "llama_fp32": RankedWindow("llama", torch.float32),
    "gpt2_smoothed": RankedWindow("gpt2", smoothing=0.1),
    "weighted": RankedWindow("gpt2", weighted=True, rule=FixedCount(micro_batches=3)),
    "lora": RankedWindow("llama", lora=True, rule=FixedSize(samples=5)),
    "mixture_of_experts": RankedWindow("mixtral"),
    "tied_and_capped": RankedWindow("nanochat"),
    "unequal": RankedWindow("llama", shares=(1.0, 0.5, 3.0, 0.1)),
    "three_samples": RankedWindow("llama", samples=3),
    "one_sample": RankedWindow("mixtral", samples=1),
    "bf16_weights": RankedWindow("llama", torch.bfloat16),
    "bf16_autocast": RankedWindow("llama", torch.float32, autocast=True),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.thorough
def test_a_divided_model_has_the_gradient_of_a_whole_one(
    ranks: Ranks, whole: Callable[[str], Any], name: str, stage: ZeroStage
) -> None:
    window, alone = replace(DIVIDED[name], zero_stage=stage), whole(name)
    bound = 1e-2 if window.autocast else TOLERANCE.get(window.dtype, 1e-2)
    for size in (2, 3, 4):
        seen = [last for _, last in ranks.run(size, accumulate, window, {})]
        assert difference(seen[0].gradient, alone.gradient) <= bound
        assert difference(seen[0].weights, alone.weights) <= bound
        for each in seen:
            assert each.loss == pytest.approx(alone.loss, rel=bound)
            assert each.grad_norm == pytest.approx(alone.grad_norm, rel=bound)
            assert each.verdict is Verdict.APPLY


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_divided_model_s_nan_skips_the_window_on_all(ranks: Ranks, stage: ZeroStage) -> None:
    ((alone, _),) = ranks.run(1, accumulate, RankedWindow("llama"), {})
    for first, second in ranks.run(3, accumulate, RankedWindow("llama", zero_stage=stage), {1: "nan"}):
        assert first.verdict is Verdict.SKIP_NOT_FINITE
        assert second.verdict is Verdict.APPLY
        assert second.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12), "nothing was left of the first"


def test_gradients_are_exchanged_once_per_window(ranks: Ranks) -> None:
    (_, coarse), _ = ranks.run(2, accumulate, RankedWindow("llama", rule=FixedCount(micro_batches=1)), {})
    (_, fine), _ = ranks.run(2, accumulate, RankedWindow("llama", rule=FixedCount(micro_batches=16)), {})
    assert fine.own_micro_batches == 16 * coarse.own_micro_batches
    assert fine.exchanges == coarse.exchanges == 1  # the model is smaller than one bucket


def test_a_rank_without_memory_makes_all_ranks_replay(ranks: Ranks) -> None:
    window = RankedWindow("llama")
    ((alone, _),) = ranks.run(1, accumulate, window, {})
    for failed in range(3):
        for first, second in ranks.run(3, accumulate, window, {failed: "out_of_memory"}):
            assert first.verdict is Verdict.REPLAY_IN_LESS_MEMORY
            assert first.out_of_memory_on == (failed,)
            assert difference(second.gradient, alone.gradient) <= 1e-12


def test_two_ranks_without_memory_are_both_named(ranks: Ranks) -> None:
    troubles = {0: "out_of_memory", 2: "out_of_memory"}
    found = ranks.run(3, accumulate, RankedWindow("mixtral"), troubles)
    assert [first.out_of_memory_on for first, _ in found] == [(0, 2)] * 3


def test_a_stop_of_one_rank_stops_all(ranks: Ranks) -> None:
    found = ranks.run(3, accumulate, RankedWindow("llama"), {2: "stop"})
    assert [first.verdict for first, _ in found] == [Verdict.INTERRUPT] * 3


def test_one_rank_s_nan_skips_the_window_on_all(ranks: Ranks) -> None:
    for first, second in ranks.run(3, accumulate, RankedWindow("llama"), {1: "nan"}):
        assert first.verdict is Verdict.SKIP_NOT_FINITE
        assert second.verdict is Verdict.APPLY
        assert np.isfinite(second.weights).all()


def test_a_skipped_window_changes_no_weight(ranks: Ranks) -> None:
    window = RankedWindow("llama")
    ((alone, _),) = ranks.run(1, accumulate, window, {})
    for _, second in ranks.run(2, accumulate, window, {0: "nan"}):
        assert difference(second.weights, alone.weights) <= 1e-12


def test_a_loss_scale_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    window = RankedWindow("llama")
    ((alone, _),) = ranks.run(1, accumulate, window, {})
    for first, _ in ranks.run(2, accumulate, window, {}, 1024.0):
        assert difference(first.weights, alone.weights) <= 1e-12
        assert first.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12)


lengths = st.lists(st.integers(1, 4096), max_size=200)
shares = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8)


@given(lengths, shares, st.booleans())
def test_every_sample_goes_to_exactly_one_rank(given_: list[int], speeds: list[float], sorted_: bool) -> None:
    taken = partition(np.array(given_, dtype=np.int64), speeds, by_length=sorted_)
    assert len(taken) == len(speeds)
    assert sorted(position for part in taken for position in part) == list(range(len(given_)))


@given(lengths.filter(bool), shares)
def test_no_rank_works_longer_than_the_best_plus_one_sample(given_: list[int], speeds: list[float]) -> None:
    taken = partition(np.array(given_, dtype=np.int64), speeds)
    seconds = [sum(given_[i] for i in part) / speed for part, speed in zip(taken, speeds, strict=True)]
    ideal = sum(given_) / sum(speeds)
    assert max(seconds) <= ideal + max(given_) / min(speeds)


def test_the_faster_rank_takes_more() -> None:
    taken = partition(np.full(400, 100, dtype=np.int64), [3.0, 1.0])
    assert [len(part) for part in taken] == [300, 100]


budgets_ = st.builds(BudgetCosts, st.integers(16, 8192), st.floats(0.0, 512.0))
unequal = st.lists(st.tuples(st.floats(0.05, 1.0), budgets_), min_size=1, max_size=5)


def costs_of(lengths: np.ndarray, taken: list[list[int]], budgets: list[BudgetCosts]) -> list[float]:
    """What each rank's micro-batches cost, in tokens."""
    return [
        budget.of(
            lengths[part], cut_window(lengths[part], TokenBudget(tokens=budget.tokens), fixed=budget.fixed)
        )
        for part, budget in zip(taken, budgets, strict=True)
    ]


@given(lengths, unequal)
def test_by_length_every_sample_goes_to_exactly_one_rank(given_: list[int], ranks_: list[Any]) -> None:
    speeds, budgets = ([each[i] for each in ranks_] for i in (0, 1))
    taken = partition_by_length(np.array(given_, dtype=np.int64), speeds, budgets)
    assert len(taken) == len(speeds)
    assert sorted(position for part in taken for position in part) == list(range(len(given_)))


@given(lengths.filter(bool), unequal)
def test_by_length_no_rank_could_leave_a_sample_to_the_next(given_: list[int], ranks_: list[Any]) -> None:
    """The slowest rank's time is at most that of any other division in the same order, found by trying all
    of them for two ranks."""
    speeds, budgets = ([each[i] for each in ranks_[:2]] for i in (0, 1))
    ordered = np.sort(np.array(given_, dtype=np.int64))[::-1]
    taken = partition_by_length(ordered, speeds, budgets)
    found = max(c / s for c, s in zip(costs_of(ordered, taken, budgets), speeds, strict=True))
    order = sorted(range(len(speeds)), key=lambda rank: -budgets[rank].tokens)
    least = float("inf")
    for end in range(len(ordered) + 1) if len(speeds) == 2 else [len(ordered)]:
        parts: list[list[int]] = [[] for _ in speeds]
        parts[order[0]] = list(range(end))
        if len(speeds) == 2:
            parts[order[1]] = list(range(end, len(ordered)))
        least = min(least, max(c / s for c, s in zip(costs_of(ordered, parts, budgets), speeds, strict=True)))
    assert found <= least * 1.003


def test_the_rank_with_the_largest_budget_takes_the_longest_samples() -> None:
    budgets = [BudgetCosts(512, 128.0), BudgetCosts(1024, 128.0)]
    short, long = partition_by_length(np.array([10, 500, 20, 400, 30, 10]), [1.0, 1.0], budgets)
    assert set(long) <= {1, 3}
    assert set(short) >= {0, 2, 4, 5}


def test_a_slow_rank_with_the_largest_budget_leaves_long_samples_to_others() -> None:
    budgets = [BudgetCosts(4096, 16.0), BudgetCosts(2048, 16.0)]
    short, long = partition_by_length(np.array([500, 20, 20, 20]), [0.1, 1.0], budgets)
    assert 0 in long
    assert short


def test_dividing_a_large_window_takes_time_in_proportion_to_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts how many costs are computed for eight ranks."""
    lengths = np.random.default_rng(1).lognormal(4.5, 0.8, 3000).astype(np.int64).clip(4, 2048)
    computed = 0

    def counted(*arguments: Any) -> Any:
        nonlocal computed
        costs = costs_of_longest(*arguments)
        computed += len(costs)
        return costs

    monkeypatch.setattr("workers.training.distributed.partition.costs_of_longest", counted)
    partition_by_length(lengths, [0.125] * 8, [BudgetCosts(16384, 1024.0)] * 8)
    assert computed < 12 * len(lengths)


def test_what_a_rank_has_already_counts() -> None:
    budgets = [BudgetCosts(100, 25.0)] * 2
    first, second = partition_by_length(np.full(40, 10), [1.0, 1.0], budgets, initial_loads=[250.0, 0.0])
    assert len(first) < len(second)


def test_unequal_ranks_pad_less_than_if_each_took_samples_of_all_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(4.3, 0.8, 64).astype(np.int64).clip(4, 512)
    budgets, speeds = [BudgetCosts(1536, 128.0), BudgetCosts(512, 128.0)], [2.0, 1.0]
    by_length = costs_of(lengths, partition_by_length(lengths, speeds, budgets), budgets)
    mixed = costs_of(lengths, partition(lengths, speeds), budgets)
    times = [max(c / s for c, s in zip(costs, speeds, strict=True)) for costs in (by_length, mixed)]
    assert times[0] < 0.95 * times[1]


def training_of(rules: list[MicroBatchRule], lengths: list[int]) -> Any:
    """As much of a run on several ranks as dividing a window needs."""
    plan = cpu_plan(make_spec())
    share = 1 / len(rules)
    ranks = [
        plan.ranks[0].model_copy(update={"micro_batch_rule": rule, "share_of_tokens": share})
        for rule in rules
    ]
    events: list[str] = []
    return SimpleNamespace(
        assignment=SimpleNamespace(spec=make_spec(), plan=plan),
        batch=len(lengths),
        budgets=[Budget(rank, LearnedBudget(), len(lengths)) for rank in ranks],
        group=SimpleNamespace(rank=0, size=len(rules)),
        loader=SimpleNamespace(lengths=lambda window: np.array(lengths), limit_buckets=lambda tokens: None),
        replica=SimpleNamespace(free_memory=lambda: None, model=None),
        shares=SimpleNamespace(now=[1.0] * len(rules)),
        reporter=SimpleNamespace(event=lambda kind, message, *_, **__: events.append(message)),
        state=RunState(),
        events=events,
    )


@pytest.mark.parametrize("measured", [False, True])
def test_a_fixed_number_of_micro_batches_is_each_rank_s(measured: bool) -> None:
    """The first micro-batch, which is drawn at random from the whole window, is no larger than the others."""
    training = training_of([FixedCount(micro_batches=2)] * 2, [10] * 16)
    groups = divide(training, np.arange(16), measured=measured)
    assert [[len(group) for group in own] for own in groups] == [[4, 4], [4, 4]]
    assert sorted(sample for own in groups for group in own for sample in group) == list(range(16))


def test_two_ranks_without_memory_for_one_sample_recompute_activations_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = training_of([FixedSize(samples=1)] * 2, [10, 10])
    recomputed: list[object] = []
    monkeypatch.setattr("workers.training.accumulate.recompute_activations", recomputed.append)
    groups = divide(training, np.arange(2))
    reduce_memory(training, groups, (0, 1), np.array([10, 10]))
    assert len(recomputed) == 1
    assert training.state.fallbacks.checkpointing
    with pytest.raises(CannotTrain, match="out of memory"):
        reduce_memory(training, groups, (1,), np.array([10, 10]))


def test_a_rank_without_memory_and_without_work_fails_the_job() -> None:
    training = training_of([FixedSize(samples=4)] * 2, [10])
    with pytest.raises(CannotTrain, match="out of memory"):
        reduce_memory(training, divide(training, np.arange(1)), (1,), np.array([10]))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_with_fewer_samples_than_ranks(tmp_path: Path, strategy: Strategy) -> None:
    spec = make_spec(data=small_data(), effective_batch_size=1, max_steps=3)
    run = with_ranks(create_run(tmp_path / "run", spec), [1.0, 0.0], strategy)
    assert len(log_of(finished(run))) == 3


def test_a_stop_before_the_ranks_have_started_is_a_stop(tmp_path: Path) -> None:
    ranks = [get_context("fork").Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    try:
        assert rank_launcher._watch(RunDirectory(tmp_path), ranks, lambda: True, 0) == INTERRUPTED
    finally:
        rank_launcher._kill(ranks)
