"""Checkpoints that are written while training goes on, as those of a GPU's run are."""

import errno
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.contract.plan import FixedSize
from app.contract.spec import ValidationSpec
from tests.harness.runs import create_run, log_of, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, interrupted_at, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.checkpoint_writer import CheckpointWriter
from workers.training.checkpoints.state import Progress, RunState
from workers.training.models.parameters import Parameters

SPEC = make_spec(data=small_data(), max_steps=12, save_every=2)


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = partial(CheckpointWriter, in_background=True)
    monkeypatch.setattr("workers.training.start.CheckpointWriter", lambda folder, **_: forced(folder))


def a_run(path: Path, attempt: int = 1) -> RunDirectory:
    return create_run(path, SPEC, attempt=attempt, rule=FixedSize(samples=8))


def on_each_write(monkeypatch: pytest.MonkeyPatch, call: Callable[[RunState], None]) -> None:
    """Calls a function before a checkpoint is written."""
    own = checkpoint.save

    def save(folder: Path, state: RunState, content: Any) -> Path | None:
        call(state)
        return own(folder, state, content)

    monkeypatch.setattr(checkpoint, "save", save)


def test_a_run_trains_as_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = a_run(tmp_path / "plain")
    run_to_end(plain)
    with monkeypatch.context() as patched:
        patched.setattr(
            "workers.training.start.CheckpointWriter",
            lambda folder, **_: CheckpointWriter(folder, in_background=True),
        )
        run = a_run(tmp_path / "run")
        interrupted_at(run, 25)
        between = {path.name for path in checkpoint.newest_first(run.checkpoints)}
        run_to_end(a_run(tmp_path / "run", attempt=2))
    assert between
    assert log_of(run) == log_of(plain)
    assert all(torch.equal(weight, weights(run)[name]) for name, weight in weights(plain).items())
    newest = [folder.checkpoints for folder in (run, plain)]
    states = [(checkpoint.newest_first(each)[0] / "optimizer.safetensors").read_bytes() for each in newest]
    assert states[0] == states[1]
    steps = [event["data"]["step"] for event in events_of_kind(run, "checkpoint")]
    assert {2, 4, 6, 8, 10, 12} <= set(steps)
    assert steps == sorted(steps)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None
) -> None:
    run = a_run(tmp_path / "run")
    reached = threading.Event()
    seen: list[int] = []

    def wait_for_the_next_step(state: RunState) -> None:
        if state.step == 2:
            assert reached.wait(60), "training waited for the checkpoint"
        seen.append(state.step)

    from workers.training import fit

    def advance(training: Any) -> None:
        own(training)
        if training.state.step == 3:
            reached.set()

    own = fit.advance
    monkeypatch.setattr(fit, "advance", advance)
    on_each_write(monkeypatch, wait_for_the_next_step)
    run_to_end(run)
    assert sorted(set(seen)) == [2, 4, 6, 8, 10, 12]


def test_a_checkpoint_that_cannot_be_written_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None
) -> None:
    def fail(state: RunState) -> None:
        if state.step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    run = a_run(tmp_path / "run")
    with monkeypatch.context() as patched:
        on_each_write(patched, fail)
        with pytest.raises(OSError, match="No space left"):
            run_to_end(run)
    assert events_of_kind(run, "checkpoint")[-1]["data"]["step"] == 2
    run_to_end(a_run(tmp_path / "run", attempt=2))
    assert len(log_of(run)) == 12


def test_a_checkpoint_is_reported_although_a_later_window_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None
) -> None:
    """Each new checkpoint resets the count of crashes."""
    from workers.training import fit

    own = fit.advance

    def advance(training: Any) -> None:
        if training.state.step == 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        own(training)

    run = a_run(tmp_path / "run")
    monkeypatch.setattr(fit, "advance", advance)
    on_each_write(monkeypatch, lambda _: threading.Event().wait(0.3) and None)
    with pytest.raises(RuntimeError, match="launch failure"):
        run_to_end(run)
    assert [event["data"]["step"] for event in events_of_kind(run, "checkpoint")] == [2]


def test_a_checkpoint_whose_report_was_lost_is_reported_when_the_run_resumes(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    interrupted_at(run, 25)
    newest = checkpoint.newest_first(run.checkpoints)[0].name
    assert run.has_reported(newest)
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if newest not in line))
    assert not run.has_reported(newest)
    run_to_end(a_run(tmp_path / "run", attempt=2))
    assert [event["data"]["name"] for event in events_of_kind(run, "checkpoint")].count(newest) == 1


def test_a_newer_checkpoint_stands_for_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_first(state: RunState) -> None:
        if state.step == 0:
            raise OSError(errno.EIO, "Input/output error")

    on_each_write(monkeypatch, fail_at_first)
    writer, state = CheckpointWriter(tmp_path, in_background=True), RunState()
    layer = nn.Linear(3, 3)
    assert writer.write(state, content_of(layer)) == []
    state.progress.step = 7
    [(step, path)] = writer.write(state, content_of(layer))
    assert step == 7
    assert path is not None
    writer.close()


def test_training_waits_if_the_memory_for_the_copy_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    writer, content = CheckpointWriter(tmp_path, in_background=True), content_of(nn.Linear(3, 3))
    with monkeypatch.context() as patched:
        patched.setattr("workers.training.checkpoints.checkpoint_writer.torch.empty", refuse)
        assert len(writer.write(RunState(), content)) == 1
    assert len(writer.write(RunState(Progress(step=1)), content)) == 1
    writer.close()


def test_the_best_checkpoint_is_marked_again_if_a_kill_came_before_the_mark(tmp_path: Path) -> None:
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=share), max_steps=8, save_every=100, eval_every=4)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=8))
    interrupted_at(run, 25)
    mark = run.checkpoints / checkpoint.BEST
    best = mark.read_text()
    for newer in checkpoint.newest_first(run.checkpoints):
        if newer.name > best:
            shutil.rmtree(newer)
    mark.unlink()
    interrupted_at(create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=8)), 0)
    assert mark.read_text() == best


def content_of(layer: nn.Linear) -> checkpoint.Content:
    return checkpoint.collect(Parameters(layer), torch.optim.SGD(layer.parameters()))


def test_the_copy_does_not_change_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, may_write = nn.Linear(3, 3), threading.Event()
    before = layer.weight.detach().clone()
    on_each_write(monkeypatch, lambda _: may_write.wait(60) and None)
    writer = CheckpointWriter(tmp_path, in_background=True)
    state = RunState()
    assert writer.write(state, content_of(layer)) == []
    with torch.no_grad():
        layer.weight.zero_()
    state.progress.step = 7
    assert writer.written() == []
    may_write.set()
    [(step, path)] = writer.wait()
    writer.close()
    assert step == 0
    assert path is not None
    other = nn.Linear(3, 3)
    restored, _ = checkpoint.restore(tmp_path, Parameters(other), torch.optim.SGD(other.parameters()))
    assert restored is not None
    assert restored.step == 0
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("available", [0.0, 1e12])
def test_training_waits_if_the_host_has_no_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: float
) -> None:
    monkeypatch.setattr("workers.training.devices.host_memory.available_on_host", lambda: available)
    writer = CheckpointWriter(tmp_path, in_background=True)
    at_once = writer.write(RunState(), content_of(nn.Linear(3, 3)))
    assert len(at_once) == (available == 0.0)
    assert len(writer.wait()) == (available > 0.0)
    writer.close()
