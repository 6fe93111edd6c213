"""Regression tests for the twelfth attack: ranks that start again after running out of memory."""

from pathlib import Path

import pytest

from app.contract.reports import Failure, LearnedLimits
from tests.harness.runs import create_run, with_ranks
from tests.harness.specs import cpu_plan, make_spec
from workers.reporter import SilentReporter
from workers.run_directory import RANKS_MUST_RESTART, RunDirectory
from workers.training.checkpoints.state import LearnedBudget, RunState
from workers.training.distributed import rank_launcher
from workers.training.distributed.group import ALONE
from workers.training.micro_batches.budget import WINDOWS_BEFORE_GROWTH, Budget
from workers.training.start import apply_learned

FITS = 128
"""The most tokens that a rank of the simulation has memory for."""


def restarted(run: RunDirectory, state: RunState) -> RunState:
    """The state of a new start from a checkpoint, with what the rank has learned since."""
    again = RunState(budgets=[LearnedBudget(**vars(own)) for own in state.budgets])
    apply_learned(run, run.assignment().plan, again, SilentReporter(1), ALONE)
    return again


@pytest.mark.parametrize("checkpoint_every", [1, 7, 40, 50, 60])
def test_ranks_start_again_only_a_few_times(tmp_path: Path, checkpoint_every: int) -> None:
    """Even if the budget that fits is that of the checkpoint, and a larger one is tried after each start."""
    run = create_run(tmp_path / "run", make_spec())
    rank = cpu_plan(make_spec()).ranks[0]
    saved, steps, starts = RunState(budgets=[LearnedBudget(tokens=FITS, failed_tokens=4 * FITS)]), 0, 0
    state = saved
    while steps < 10 * WINDOWS_BEFORE_GROWTH:
        budget = Budget(rank, state.budgets[0], 8)
        tokens = state.budgets[0].tokens
        assert tokens is not None
        if tokens > FITS:
            learned = budget.lower_after_failure(tokens)
            run.write_learned(0, LearnedLimits(tokens=learned, failed_tokens=tokens, checkpointing=False))
            starts += 1
            assert starts < 20, "it would start again for ever"
            steps -= steps % checkpoint_every
            state = restarted(run, saved)
            continue
        budget.record_fit(tokens)
        steps += 1
        if steps % checkpoint_every == 0:
            saved = RunState(budgets=[LearnedBudget(**vars(state.budgets[0]))])
    assert starts >= 1


def test_ranks_that_start_again_and_again_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_ranks(create_run(tmp_path / "run", make_spec()), [0.5, 0.5], "fsdp")
    monkeypatch.setattr(rank_launcher, "_launch_once", lambda *_: RANKS_MUST_RESTART)
    assert rank_launcher.launch(run, run.assignment().plan.ranks, "cpu", lambda: False) == 1
    failure = run.failure()
    assert isinstance(failure, Failure)
    assert (failure.code, failure.permanent) == ("out_of_memory", True)
