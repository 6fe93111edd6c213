"""Held-out prompts, completed before and after training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin

from app.contract.model_reference import LoraSpec
from app.contract.spec import MethodSpec, ValidationSpec
from tests.harness.runs import create_run, events_of, log_of, small_data
from tests.harness.specs import make_spec
from tests.harness.training import interrupted_at, run_to_end
from workers.run_directory import RunDirectory
from workers.training.data.preparation import Samples
from workers.training.losses.loss import TokenLoss
from workers.training.reporting import completions

HELD_BACK = small_data(validation=ValidationSpec(file_id=None, sha256=None, format=None, share=0.2))


def trained(folder: Path, count: int, **changes: object) -> RunDirectory:
    run = create_run(folder, make_spec(data=HELD_BACK, max_steps=6, completions=count, **changes))
    run_to_end(run)
    return run


def test_stored_completions_equal_the_models_greedy_output(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 3)
    made = run.completions()
    assert made is not None
    assert len(made.data) == 3
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    for folder, when in ((tmp_path / "tiny-gpt2", "before"), (run.model, "after")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for each in made.data:
            given = tokenizer(each.prompt, return_tensors="pt")
            with torch.no_grad():
                said = model.generate(**given, max_new_tokens=completions.MAX_NEW_TOKENS, do_sample=False)
            text = tokenizer.decode(said[0, given.input_ids.shape[1] :], skip_special_tokens=True)
            assert getattr(each, when) == text
    assert any(each.before != each.after for each in made.data)


def test_completions_do_not_change_the_training(tmp_path: Path) -> None:
    plain, requested = (trained(tmp_path / f"run{count}", count) for count in (0, 3))
    assert plain.completions() is None
    assert log_of(plain) == log_of(requested)
    assert (plain.model / "model.safetensors").read_bytes() == (
        requested.model / "model.safetensors"
    ).read_bytes()


def test_completions_with_adapters(tmp_path: Path) -> None:
    lora = LoraSpec(r=4, alpha=8, dropout=0.1, target_modules=None, merge=False)
    made = trained(tmp_path / "run", 2, method=MethodSpec(name="lora", lora=lora)).completions()
    assert made is not None
    assert all(each.before is not None and each.after is not None for each in made.data)


@pytest.mark.parametrize("recomputes", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_weights_in_bf16_are_kept_only_if_they_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recomputes: bool
) -> None:
    """Completions are made of many passes. With gradient checkpointing, the backward pass converts weights
    again, so that copies of all layers would be of no use."""
    kept: dict[str, set[bool]] = {"forward": set(), "generate": set()}
    for kind, name in ((TokenLoss, "forward"), (GenerationMixin, "generate")):
        honest = getattr(kind, name)

        def watched(*given: Any, name: str = name, honest: Any = honest, **named: Any) -> Any:
            if torch.is_autocast_enabled("cpu"):
                kept[name].add(torch.is_autocast_cache_enabled())
            return honest(*given, **named)

        monkeypatch.setattr(kind, name, watched)
    trained(tmp_path / "run", 2, precision="bf16", gradient_checkpointing=recomputes)
    assert kept == {"forward": {not recomputes}, "generate": {True}}


def cannot_generate(*_: object) -> str:
    raise NotImplementedError("no cache for this family")


def test_a_model_that_cannot_generate_is_still_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_complete", cannot_generate)
    run = trained(tmp_path / "run", 2)
    assert run.completions() is None
    assert [event["level"] for event in events_of(run) if event["type"] == "completions"] == ["warning"] * 2
    assert run.model.is_dir()


def test_prompts_end_where_the_model_must_continue(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 2)
    held_back = Samples(run.data / "validation")
    assert len(completions.prompts(held_back, 100)) == len(held_back)
    (prompt,) = completions.prompts(held_back, 1)
    tokens, counts = held_back.read(0)
    assert prompt.tokens + prompt.expected == tokens[: len(prompt.tokens + prompt.expected)].tolist()
    assert np.all(counts)  # of a text, which is cut in its middle
    assert len(prompt.tokens) == len(tokens) // 2


def test_evaluations_complete_the_prompts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MOST_SHARE", 1.0)
    plain = trained(tmp_path / "plain", 0, eval_every=2)
    run = trained(tmp_path / "run", 2, eval_every=2)
    made = run.completions()
    assert made is not None
    for each in made.data:
        assert [known.step for known in each.at_evaluations] == [2, 4]  # the last one is `after`
        assert each.before is not None
        assert each.after is not None
    assert any(len({each.before, each.at_evaluations[0].text, each.after}) > 1 for each in made.data)
    assert log_of(plain) == log_of(run)


def test_completions_of_steps_that_are_repeated_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MOST_SHARE", 1.0)
    monkeypatch.setattr(completions, "KEPT", 3)
    spec = make_spec(data=HELD_BACK, max_steps=12, completions=1, eval_every=2, save_every=5)
    run = create_run(tmp_path / "run", spec)
    interrupted_at(run, 20)
    run_to_end(create_run(tmp_path / "run", spec, attempt=2))
    made = run.completions()
    assert made is not None
    assert [known.step for known in made.data[0].at_evaluations] == [6, 8, 10]


def test_completions_at_evaluations_take_little_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions.time, "monotonic", lambda: 200.0)
    assert completions.Spent(began=0.0, seconds=10.0).allows_more()
    assert not completions.Spent(began=0.0, seconds=10.1).allows_more()


def test_a_model_that_cannot_generate_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_complete", cannot_generate)
    run = trained(tmp_path / "run", 2, eval_every=1)
    warnings = [event for event in events_of(run) if event["type"] == "completions"]
    assert len(warnings) == 3  # before, at the first evaluation, and after
