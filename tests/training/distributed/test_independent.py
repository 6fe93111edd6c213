"""Independent replicas: each trains on its own part of the data, and the job's model is their average or the
best."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from app.contract.spec import EarlyStopping, RequestedSplit, Shard, Spec, ValidationSpec
from tests.harness.preferences import preference_run
from tests.harness.runs import create_run, events_of, small_data, start_trainer, until, with_ranks
from tests.harness.specs import make_spec
from tests.harness.training import finished, log_of_run, raw_log, weights
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.state import RunState
from workers.training.data.preparation import of_shard
from workers.training.distributed.combine import final_checkpoint
from workers.training.distributed.independent import replica_folder
from workers.training.models.parameters import Parameters

SECONDS = 240.0
STEPS = 6


def spec_of(replicas: int, **changes: object) -> Spec:
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    fields = {
        "data": small_data(validation=validation),
        "strategy": "independent",
        "split": RequestedSplit(accumulation_steps=None, micro_batch_size=None, devices=replicas),
        "max_steps": STEPS,
        "save_every": 2,
        "eval_every": 3,
        **changes,
    }
    return make_spec(**fields)


def run_of(folder: Path, spec: Spec, devices: int, attempt: int = 1) -> RunDirectory:
    return with_ranks(create_run(folder, spec, attempt=attempt), [1 / devices] * devices, "independent")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_disjoint_and_cover_everything(count: int) -> None:
    taken = np.random.default_rng(0).random(50) < 0.7
    shards = [of_shard(Shard(index=index, count=count), taken) for index in range(count)]
    assert np.array_equal(np.sum(shards, axis=0), taken)
    sizes = [int(shard.sum()) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.thorough
def test_the_average_of_two_replicas(tmp_path: Path) -> None:
    run = finished(run_of(tmp_path / "run", spec_of(2, average=True), 2))
    first, second, own = weights(replica_folder(run, 0)), weights(replica_folder(run, 1)), weights(run)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name, weight in own.items():
        assert torch.allclose(weight, (first[name] + second[name]) / 2, atol=1e-7)
    outcome = run.outcome()
    assert outcome is not None
    assert outcome.replicas is not None
    assert outcome.eval_loss is not None
    assert [each.steps for each in outcome.replicas] == [STEPS, STEPS]
    assert all(each.eval_loss is not None for each in outcome.replicas)
    log = raw_log(run)
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    parts = [raw_log(replica_folder(run, number)) for number in (0, 1)]
    for step, line in enumerate(log):
        assert line["samples"] == sum(part[step]["samples"] for part in parts)
        assert len(line["ranks"]) == 2
    [combined] = [event for event in events_of(run) if event["type"] == "combined"]
    assert "average" in combined["message"]


@pytest.mark.thorough
def test_replicas_take_turns_on_one_device_and_the_best_is_the_job_s_model(tmp_path: Path) -> None:
    run = finished(run_of(tmp_path / "run", spec_of(3), 1))
    outcome = run.outcome()
    assert outcome is not None
    assert outcome.replicas is not None
    losses = [each.eval_loss for each in outcome.replicas if each.eval_loss is not None]
    best = int(np.argmin(losses))
    assert outcome.eval_loss == pytest.approx(losses[best], rel=1e-6)
    expected, own = weights(replica_folder(run, best)), weights(run)
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("stop_requested", [True, False])
def test_a_replica_that_a_user_stops_keeps_its_model_as_it_is(tmp_path: Path, stop_requested: bool) -> None:
    spec = spec_of(2, early_stopping=EarlyStopping(patience=1000, min_delta=0.0))
    run = create_run(tmp_path / "run", spec)
    model = torch.nn.Linear(2, 2)
    content = checkpoint.collect(Parameters(model), torch.optim.SGD(model.parameters()))
    state = RunState()
    for step in (1, 2):
        state.progress.step = step
        state.position.consumed = step
        state.evaluations.best_step = 1
        state.progress.stop_requested = stop_requested and step == 2
        checkpoint.save(run.checkpoints, state, content)
    chosen = checkpoint.state_of(final_checkpoint(run))
    assert chosen.progress.step == (2 if stop_requested else 1)


@pytest.mark.thorough
def test_completions_and_trackers_are_those_of_the_job(tmp_path: Path) -> None:
    spec = spec_of(2, completions=3, report_to=("tensorboard",), certificate=False)
    run = finished(run_of(tmp_path / "run", spec, 2))
    completions, outcome = run.completions(), run.outcome()
    assert completions is not None
    assert outcome is not None
    assert len(completions.data) == 3
    assert all(each.before is not None and each.after is not None for each in completions.data)
    assert list((run.path / "tensorboard").iterdir())
    assert outcome.equivalence_error is None, "nothing was compared"


@pytest.mark.thorough
def test_rewards_are_those_of_all_replicas(tmp_path: Path) -> None:
    split = RequestedSplit(accumulation_steps=None, micro_batch_size=None, devices=2)
    laid = preference_run(tmp_path, "dpo", strategy="independent", split=split, max_steps=4)
    run = finished(with_ranks(laid, [0.5, 0.5], "independent"))
    parts = [raw_log(replica_folder(run, number)) for number in (0, 1)]
    for step, line in enumerate(raw_log(run)):
        margins = [part[step]["rewards"]["margin"] for part in parts]
        samples = [part[step]["samples"] for part in parts]
        assert line["rewards"]["margin"] == pytest.approx(np.average(margins, weights=samples))
        losses = [part[step]["loss"] for part in parts]
        assert line["loss"] == pytest.approx(np.average(losses, weights=samples))


@pytest.mark.thorough
def test_an_interrupted_job_continues_each_replica(tmp_path: Path) -> None:
    spec = spec_of(2, average=True, max_steps=30)
    undisturbed = finished(run_of(tmp_path / "undisturbed", spec, 2))
    run = run_of(tmp_path / "run", spec, 2)
    trainer = start_trainer(run)
    until(lambda: len(log_of_run(run)) >= 4 or trainer.poll() is not None, SECONDS)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(SECONDS) == INTERRUPTED, run.trainer_log.read_text()[-3000:]
    finished(run_of(tmp_path / "run", spec, 2, attempt=2))
    expected, own = weights(undisturbed), weights(run)
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())
    steps = [line["step"] for line in log_of_run(run)]
    assert steps == list(range(1, 31))
    told = [event["message"] for event in events_of(run) if event["attempt"] == 2]
    assert not any("samples" in message and "attempt" in message for message in told)
    for number in (0, 1):
        own = raw_log(replica_folder(run, number))
        last = {line["step"]: line["input_tokens"] for line in own}
        assert raw_log(run)[-1]["ranks"][number]["total_tokens"] == sum(last.values())


@pytest.mark.thorough
def test_a_replica_s_failure_is_the_job_s(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", spec_of(2, freeze=("nothing",)), 2)
    assert start_trainer(run).wait(SECONDS) == 1
    failure = run.failure()
    assert failure is not None
    assert (failure.code, failure.permanent) == ("freeze", True)
    assert failure.message.startswith("replica ")
