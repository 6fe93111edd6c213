"""Whole runs on several ranks: the same result as on one, and the same end whatever happens to a rank."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from app.contract.plan import TokenBudget
from app.contract.spec import Strategy, ValidationSpec
from tests.harness.runs import (
    create_run,
    events_of,
    log_of,
    small_data,
    start_ranks,
    start_trainer,
    until,
    with_ranks,
)
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, finished, raw_log, trains_alike, weight_difference
from workers.orphaned_processes import children_of
from workers.run_directory import INTERRUPTED, RunDirectory

pytestmark = pytest.mark.thorough

SECONDS = 240
ENDS_WITHIN = 15.0


def ended_at(run: RunDirectory, step: int) -> None:
    """Runs the trainer, and stops it after a step."""
    trainer = start_trainer(run)
    until(lambda: steps_of(run) >= step or trainer.poll() is not None, SECONDS)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(SECONDS) == INTERRUPTED, run.trainer_log.read_text()[-3000:]


def steps_of(run: RunDirectory) -> int:
    return len(run.metrics.read_bytes().splitlines()) if run.metrics.exists() else 0


def ranks_of(trainer: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of a trainer's ranks: the descendants with the names of ranks."""
    found, waiting = [], [trainer.pid]
    while waiting:
        pid = waiting.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in map(int, children.read_text().split() if children.exists() else []):
            waiting.append(child)
            if Path(f"/proc/{child}/comm").read_text().startswith("trainer rank"):
                found.append(child)
    return sorted(found)


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.7, 0.2, 0.1]], ids=["two ranks", "three unequal ranks"])
def test_a_run_on_several_ranks_trains_as_on_one(tmp_path: Path, shares: list[float]) -> None:
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(validation=validation), certificate=True, eval_every=4, noise_scale_every=1
    )
    alone = finished(create_run(tmp_path / "alone", spec))
    together = finished(with_ranks(create_run(tmp_path / "together", spec), shares))
    trains_alike(together, alone)


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=24, save_every=2)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = create_run(tmp_path / "moved", spec)
    for attempt, ranks in enumerate((1, 2, 3), 1):
        create_run(tmp_path / "moved", spec, attempt=attempt)
        ended_at(with_ranks(run, [1 / ranks] * ranks), 4 * attempt)
    create_run(tmp_path / "moved", spec, attempt=4)
    finished(run)
    for one, other in zip(log_of(run), log_of(alone), strict=True):
        assert (one["step"], one["samples"]) == (other["step"], other["samples"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert weight_difference(run, alone) <= 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_unequal_budgets_agree_on_the_certificate(tmp_path: Path, strategy: Strategy) -> None:
    spec = make_spec(data=small_data(), certificate=True, effective_batch_size=20, max_steps=3)
    run = with_ranks(create_run(tmp_path / "run", spec), [0.7, 0.3], strategy)
    assignment = run.assignment()
    ranks = tuple(
        rank.model_copy(update={"micro_batch_rule": TokenBudget(tokens=tokens)})
        for rank, tokens in zip(assignment.plan.ranks, (512, 64), strict=True)
    )
    plan = assignment.plan.model_copy(update={"ranks": ranks})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))
    finished(run)
    (certificate,) = events_of_kind(run, "certificate")
    assert certificate["data"]["gradient_error"] <= certificate["data"]["tolerance"]


def test_a_tuned_run_continues_on_more_ranks(tmp_path: Path) -> None:
    """The new rank has measured nothing yet."""
    spec = make_spec(data=small_data(), max_steps=12, save_every=1, tune="first")
    run = create_run(tmp_path / "run", spec)
    ended_at(run, 4)
    assert len(events_of_kind(run, "tuned")) == 1
    create_run(tmp_path / "run", spec, attempt=2)
    finished(with_ranks(run, [0.5, 0.5]))
    assert [line["step"] for line in log_of(run)] == list(range(1, 13))
    assert len(events_of_kind(run, "tuned")) == 2


@pytest.mark.parametrize("fault", ["kill", "stop", "crash"])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_fails_ends_all_ranks(tmp_path: Path, fault: str, rank: int) -> None:
    run = with_ranks(create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=10**6)), [0.5, 0.5])
    trainer = start_trainer(run)
    until(lambda: steps_of(run) >= 3, SECONDS)
    pids = ranks_of(trainer)
    assert len(pids) == 2
    ends = [os.pidfd_open(pid) for pid in pids]
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}[fault]
    os.kill(pids[rank], number)
    assert trainer.wait(ENDS_WITHIN) not in (0, INTERRUPTED)
    for end in ends:
        assert is_over(end), "no rank is left"
    failure = run.failure()
    assert failure is not None
    assert not failure.permanent
    assert f"rank {rank}" in failure.message
    create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=steps_of(run) + 2), attempt=2)
    finished(run)
    assert "resumed" in [event["type"] for event in events_of(run)] or steps_of(run)


def is_over(descriptor: int) -> bool:
    import select

    ready, _, _ = select.select([descriptor], [], [], ENDS_WITHIN)
    os.close(descriptor)
    return bool(ready)


def test_the_ranks_of_a_killed_trainer_end(tmp_path: Path) -> None:
    run = with_ranks(create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=10**6)), [0.5, 0.5])
    trainer = start_trainer(run)
    until(lambda: steps_of(run) >= 1, SECONDS)
    ends = [os.pidfd_open(pid) for pid in ranks_of(trainer)] + children_of(trainer.pid)
    trainer.kill()
    trainer.wait()
    for end in ends:
        assert is_over(end)


def test_a_slow_rank_gets_a_smaller_part_of_each_window(tmp_path: Path) -> None:
    data = small_data(max_length=4)  # all samples are equally long: a rank's time depends on its tokens
    spec = make_spec(data=data, effective_batch_size=16, max_steps=16, noise_scale_every=None)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = with_ranks(create_run(tmp_path / "slow", spec), [0.5, 0.5])
    ended(start_ranks(run, [0.0, 0.2]))
    first, *_, last = raw_log(run)
    shares = [[rank["tokens"] for rank in line["ranks"]] for line in (first, last)]
    assert shares[0][0] == shares[0][1], "the plan takes both for equally fast"
    assert shares[1][0] > 2 * shares[1][1]
    assert weight_difference(run, alone) <= 1e-5
    [changed, *_] = events_of_kind(run, "rank_shares")
    assert changed["data"]["shares"] == list(run.shares()[0].shares)


def test_a_resume_divides_the_windows_that_it_repeats_as_before(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), effective_batch_size=16, max_steps=24, save_every=20)
    run = with_ranks(create_run(tmp_path / "run", spec), [0.5, 0.5])
    ranks = start_ranks(run, [0.0, 0.1])
    until(lambda: steps_of(run) >= 12, SECONDS)
    for rank in ranks:
        rank.kill()
        rank.wait()
    assert run.shares()
    before = {line["step"]: line for line in raw_log(run)}
    with_ranks(create_run(tmp_path / "run", spec, attempt=2), [0.5, 0.5])
    ended(start_ranks(run, [0.1, 0.0]))  # the other rank is slow now, which must not matter yet
    again = {line["step"]: line for line in raw_log(run) if line["attempt"] == 2}
    for step, line in before.items():
        assert [rank["tokens"] for rank in line["ranks"]] == [rank["tokens"] for rank in again[step]["ranks"]]
        assert (line["loss"], line["grad_norm"]) == (again[step]["loss"], again[step]["grad_norm"])


def ended(ranks: list[subprocess.Popen[bytes]]) -> None:
    assert [rank.wait(SECONDS) for rank in ranks] == [0] * len(ranks)


def test_an_error_of_one_rank_is_the_run_s(tmp_path: Path) -> None:
    run = with_ranks(
        create_run(tmp_path / "run", make_spec(data=small_data(), freeze=("nothing",))), [0.5, 0.5]
    )
    assert start_trainer(run).wait(SECONDS) == 1
    failure = run.failure()
    assert failure is not None
    assert (failure.code, failure.permanent) == ("freeze", True)
