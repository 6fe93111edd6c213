"""Regression tests for the nineteenth attack. Those about tokenizers that mark the beginning of a text are in
tests/training/data/test_piece_boundaries.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.contract.reports import Outcome
from app.contract.spec import EarlyStopping, ValidationSpec
from tests.harness.any_family import lay_any, make_any, small_config
from tests.harness.runs import create_run, small_data, with_ranks
from tests.harness.specs import make_schedule, make_spec
from tests.harness.training import events_of_kind, finished, run_to_end
from workers.trainer_process import failure_of
from workers.training import fit
from workers.training.checkpoints import checkpoint
from workers.training.data.preparation import held_out
from workers.training.exceptions import CannotTrain
from workers.training.losses.load_balancing_loss import load_balancing_loss_of
from workers.training.reporting.evaluation import Evaluated
from workers.training.schedule import rate_factor
from workers.training.training_run import TrainingRun


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of the model's own code
def test_a_mixture_of_experts_trains_with_compression(tmp_path: Path) -> None:
    spec = make_spec(
        data=small_data(), max_steps=2, certificate=True, effective_batch_size=8, gradient_compression="bf16"
    )
    finished(with_ranks(lay_any(tmp_path / "run", "mixtral", spec), [0.6, 0.4]))


def test_tokens_of_the_validation_data_must_have_an_embedding(tmp_path: Path) -> None:
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=validation), max_steps=2)
    texts = ["a zq" if is_held_out else "abc" for is_held_out in held_out(spec.data, spec.seed)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = lay_any(tmp_path / "run", "gpt2", spec)
    beyond = {
        "id": 270, "content": "zq", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": False,
    }  # fmt: skip
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(beyond)
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CannotTrain, match="has only 260 embeddings"):
        run_to_end(run)


def test_a_damaged_best_checkpoint_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([5.0, 4.0, 4.5, 4.6, 4.7, 4.8, 4.9, 5.0])
    monkeypatch.setattr(fit, "evaluated", lambda training: Evaluated(next(losses), 0.5))
    finish = fit.finish

    def damaged(training: TrainingRun) -> Outcome:
        best = checkpoint.best(training.run.checkpoints)
        assert best is not None
        weights = best / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
        return finish(training)

    monkeypatch.setattr(fit, "finish", damaged)
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(validation=validation), max_steps=12, eval_every=2,
        early_stopping=EarlyStopping(patience=50, min_delta=0.0),
    )  # fmt: skip
    run = create_run(tmp_path / "run", spec)
    outcome = run_to_end(run)
    assert outcome.best_step is None
    assert any("of step 4" in event["message"] for event in events_of_kind(run, "checkpoint_damaged"))


def test_a_checkpoint_may_be_damaged_twice(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=8, save_every=2)
    run = create_run(tmp_path / "run", spec)
    run_to_end(run)
    newest = checkpoint.newest_first(run.checkpoints)[0]
    kept = newest.with_name(f"damaged-{newest.name}")
    kept.mkdir()
    (kept / "model.safetensors").write_bytes(b"old")
    (newest / "model.safetensors").write_bytes(b"damaged")
    create_run(tmp_path / "run", spec, attempt=2)
    assert run_to_end(run).steps == 8
    assert (kept / "model.safetensors").read_bytes() == b"damaged"


@pytest.mark.parametrize("damage", ["pipe", "fewer files", "another step"])
def test_a_checkpoint_that_is_not_what_was_written_is_damaged(tmp_path: Path, damage: str) -> None:
    spec = make_spec(data=small_data(), max_steps=8, save_every=2)
    run = create_run(tmp_path / "run", spec)
    run_to_end(run)
    newest, older = checkpoint.newest_first(run.checkpoints)[:2]
    manifest = json.loads((newest / "manifest.json").read_text())
    if damage == "pipe":
        (newest / "manifest.json").unlink()
        os.mkfifo(newest / "manifest.json")
    elif damage == "fewer files":
        (newest / "optimizer.safetensors").unlink()
        del manifest["optimizer.safetensors"]
        (newest / "manifest.json").write_text(json.dumps(manifest))
    else:
        (newest / "state.json").write_bytes((older / "state.json").read_bytes())
        manifest["state.json"] = json.loads((older / "manifest.json").read_text())["state.json"]
        (newest / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.newest_whole(run.checkpoints) == older


@pytest.mark.parametrize(("steps", "share"), [(3, 0.9), (1, 0.3), (4, 0.8), (10, 0.95)])
def test_one_cycle_with_less_than_a_step_after_its_peak_is_pytorchs(steps: int, share: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=steps, pct_start=share)
    schedule = make_schedule("one_cycle", pct_start=share)
    for step in range(steps):
        assert rate_factor(schedule, step, steps) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step + 1 < steps:
            reference.step()


@pytest.mark.parametrize("value", [float("nan"), 1e30, -1.0])
def test_an_absurd_balance_coefficient_is_named(value: float) -> None:
    model = make_any(small_config("mixtral"))
    model.config.router_aux_loss_coef = value
    with pytest.raises(CannotTrain, match="router_aux_loss_coef"):
        load_balancing_loss_of(model, "window")


def test_fields_of_experts_in_another_family_s_config_are_ignored() -> None:
    model = make_any(small_config("gpt2"))
    model.config.router_aux_loss_coef, model.config.num_experts = 0.01, "x"
    model.config.num_experts_per_tok = 2
    assert load_balancing_loss_of(model, "window") is None


def test_weights_that_the_model_does_not_have_are_reported(tmp_path: Path) -> None:
    run = lay_any(tmp_path / "run", "gpt2", make_spec(data=small_data(), max_steps=2))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_layer": 1}))
    run_to_end(run)
    assert any("not part of the model" in event["message"] for event in events_of_kind(run, "changed"))


EXPANDING = """
import sys
from tokenizers import normalizers
from tests.harness.tokenizers import made, tokens_of
tokenizer = made("first")
many = [normalizers.Replace("a", "a" * 200) for _ in range(4)]
tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(many)
tokens_of(tokenizer, {"text": "a" * 30})
"""


@pytest.mark.thorough
def test_a_tokenizer_cannot_take_memory_without_limit(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    with log.open("wb") as printed:
        ended = subprocess.run([sys.executable, "-c", EXPANDING], stderr=printed, timeout=120, check=False)
    if ended.returncode > 0:  # Python's own error, which the trainer reports
        assert "MiB" in log.read_text()
        return
    failure = failure_of(ended.returncode, log)
    assert (failure.code, failure.permanent) == ("data_not_tokenised", True)
