"""Whole runs with a model that is divided among ranks: the same result as on one device."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.contract.spec import MethodSpec, ValidationSpec, ZeroStage
from app.planning.changes import DEFAULT_LORA
from tests.harness.runs import create_run, log_of, small_data, start_trainer, until, with_ranks
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, finished, log_of_run, trains_alike, weight_difference
from workers.run_directory import INTERRUPTED, RunDirectory

pytestmark = pytest.mark.thorough

SECONDS = 240


def stopped_at(run: RunDirectory, step: int) -> None:
    trainer = start_trainer(run)
    until(lambda: len(log_of_run(run)) >= step or trainer.poll() is not None, SECONDS)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(SECONDS) == INTERRUPTED, run.trainer_log.read_text()[-3000:]


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(3, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (2, 3), (3, 2)))],
)
def test_a_divided_model_trains_as_a_whole_one(tmp_path: Path, ranks: int, stage: ZeroStage) -> None:
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=validation), certificate=True, eval_every=4)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = create_run(tmp_path / "together", spec)
    together = finished(with_ranks(run, [1 / ranks] * ranks, "fsdp", stage))
    trains_alike(together, alone)


def test_a_run_continues_with_another_strategy(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=18, save_every=2)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = create_run(tmp_path / "moved", spec)
    stopped_at(with_ranks(run, [0.5, 0.5]), 4)
    create_run(tmp_path / "moved", spec, attempt=2)
    stopped_at(with_ranks(run, [0.5, 0.5], "fsdp", 1), 9)
    create_run(tmp_path / "moved", spec, attempt=3)
    stopped_at(with_ranks(run, [1 / 3] * 3, "fsdp"), 13)
    create_run(tmp_path / "moved", spec, attempt=4)
    finished(run)
    for one, other in zip(log_of(run), log_of(alone), strict=True):
        assert (one["step"], one["samples"]) == (other["step"], other["samples"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert weight_difference(run, alone) <= 1e-4


def test_ranks_start_again_when_one_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(data=small_data(), effective_batch_size=12, max_steps=9, save_every=1)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = with_ranks(create_run(tmp_path / "run", spec), [0.5, 0.5], "fsdp")
    monkeypatch.setenv("ACCRUE_FAIL_POINTS", "rank-1.micro_batch:memory:8")
    finished(run)
    [event] = events_of_kind(run, "out_of_memory")
    assert event["data"]["rank"] == 1
    assert event["data"]["token_budget"] < event["data"]["failed_tokens"]
    assert weight_difference(run, alone) <= 1e-5


def test_adapters_of_a_divided_model(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), method=MethodSpec(name="lora", lora=DEFAULT_LORA), max_steps=4)
    alone = finished(create_run(tmp_path / "alone", spec))
    run = finished(with_ranks(create_run(tmp_path / "run", spec), [0.5, 0.5], "fsdp"))
    one, other = (load_file(each.model / "adapter_model.safetensors") for each in (run, alone))
    assert one.keys() == other.keys()
    for name, weight in other.items():
        assert torch.allclose(one[name], weight, atol=1e-6)
