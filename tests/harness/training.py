"""Runs the trainer in this process: to its end, interrupted, or with altered losses."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.contract.reports import Outcome
from tests.harness.runs import events_of, log_of, start_trainer
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training import fit as training
from workers.training.exceptions import Interrupted
from workers.training.losses.loss import Forward
from workers.training.replica import Replica


def run_to_end(run: RunDirectory, stop: Callable[[], bool] = lambda: False) -> Outcome:
    assignment = run.assignment()
    with Reporter(run, assignment.attempt) as reporter:
        return training.fit(run, assignment, reporter, stop)


def weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    return dict(load_file(run.model / "model.safetensors"))


def interrupted_at(run: RunDirectory, checks: int) -> None:
    """Runs the trainer; its stop signal is set after it was checked `checks` times."""
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return looks > checks

    assignment = run.assignment()
    with Reporter(run, assignment.attempt) as reporter, pytest.raises(Interrupted):
        training.fit(run, assignment, reporter, stop)


def scale_losses(monkeypatch: pytest.MonkeyPatch, factor: Callable[[Any], float]) -> None:
    """Multiplies the loss of each micro-batch by `factor(batch)`."""
    honest = Replica.forward

    def spoiled(self: Replica, batch: Any) -> Forward:
        forward = honest(self, batch)
        return replace(forward, loss_sum=forward.loss_sum * factor(batch))

    monkeypatch.setattr(Replica, "forward", spoiled)


def raw_log(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def log_of_run(run: RunDirectory) -> list[dict[str, Any]]:
    """The log's steps so far; none if nothing was logged yet."""
    return log_of(run) if run.metrics.exists() else []


def weight_difference(one: RunDirectory, other: RunDirectory) -> float:
    """The difference of two trained models' weights, relative to their norm."""
    first, second = weights(one), weights(other)
    apart = sum(float((first[name] - second[name]).double().square().sum()) for name in second)
    return sqrt(apart / sum(float(weight.double().square().sum()) for weight in second.values()))


def finished(run: RunDirectory, seconds: float = 240.0) -> RunDirectory:
    """Runs the trainer in processes of its own, to its end."""
    assert start_trainer(run).wait(seconds) == 0, run.trainer_log.read_text()[-3000:]
    return run


def trains_alike(together: RunDirectory, alone: RunDirectory) -> None:
    """Checks that a run on several ranks had the same steps, losses and weights as one on a single rank."""
    assert weight_difference(together, alone) <= 1e-5
    for one, other in zip(log_of(together), log_of(alone), strict=True):
        assert (one["step"], one["samples"], one["tokens"]) == (
            other["step"],
            other["samples"],
            other["tokens"],
        )
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    [certificate] = events_of_kind(together, "certificate")
    assert certificate["data"]["gradient_error"] <= 1e-5
    evaluated = [
        [event["data"]["loss"] for event in events_of_kind(run, "evaluation")] for run in (together, alone)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


def events_of_kind(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [event for event in events_of(run) if event["type"] == kind]
