"""Regression tests for the twenty-fourth attack."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers import processors
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from app.contract.model_reference import LoraSpec
from app.contract.plan import FixedCount, TokenBudget
from app.contract.spec import MethodSpec
from tests.harness.any_family import lay_any, long_rope, make_any, small_config
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.tokenizers import made, tokens_of
from tests.harness.training import events_of_kind, run_to_end
from workers.run_directory import RunDirectory
from workers.training import packing_check
from workers.training.exceptions import CannotTrain
from workers.training.model import TOLERANCE, prepare_for_training
from workers.training.packing_check import _with_other_tokens, fill_row
from workers.training.tiny_gpt2 import make_tokenizer


def _write(folder: Path, texts: list[str]) -> None:
    (folder / "data.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))


def _reasons(run: RunDirectory) -> list[str]:
    return [event["message"] for event in events_of_kind(run, "changed")]


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recognised", [True, False])
def test_samples_are_padded_if_only_a_long_row_mixes_them(
    tmp_path: Path, recognised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 scales attention by the position in the row, not by that in the sample."""
    if not recognised:
        monkeypatch.setattr(packing_check, "_scales_by_position_in_row", lambda *_: False)
    config = small_config("llama4_text")
    config.update({
        "attn_temperature_tuning": True, "floor_scale": 2048, "attn_scale": 0.1,
        "max_position_embeddings": 1024, "no_rope_layers": [1, 0],
    })  # fmt: skip
    config.layer_types = ["chunked_attention", "full_attention"]
    model = make_any(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    _write(tmp_path, ["".join(chr(97 + (7 * at + number) % 26) for at in range(600)) for number in range(8)])
    data = small_data(packing=True).model_copy(update={"max_length": 1024, "examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, aux_scope="none")
    run = lay_any(tmp_path / "run", "llama4_text", spec, rule=FixedCount(micro_batches=1))
    run_to_end(run)
    assert any("does not keep samples apart" in each for each in _reasons(run))


@pytest.mark.sqlite
def test_samples_are_padded_if_the_model_fails_on_the_two_longest_in_a_row(tmp_path: Path) -> None:
    """GPT-Neo's mask has the size of its positions: here of one sample, but not of two."""
    _write(tmp_path, ["abcdefg hi" * 30] * 8)
    data = small_data(packing=True).model_copy(update={"max_length": 512, "examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8)
    run = lay_any(tmp_path / "run", "gpt_neo", spec, rule=TokenBudget(tokens=1024))
    run_to_end(run)
    assert any("fails on such a row" in each for each in _reasons(run))


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
def test_packing_is_checked_with_other_tokens_even_if_a_sample_repeats_one(tmp_path: Path) -> None:
    """OPT mixes the samples of a row, which 16-bit weights hide unless the other tokens differ."""
    _write(tmp_path, ["a" * 200] * 2 + ["abcdefg hi" * 3] * 30)
    data = small_data(packing=True).model_copy(update={"max_length": 256, "examples": 32})
    lora = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
    method = MethodSpec(name="lora", lora=lora)
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, method=method)
    run = lay_any(tmp_path / "run", "opt", spec, precision="bf16", rule=TokenBudget(tokens=1024))
    run_to_end(run)
    assert any("does not keep samples apart" in each for each in _reasons(run))


def test_a_row_is_filled_with_the_longest_samples_that_there_is_room_for() -> None:
    lengths = np.array([90, 60, 50, 30, 30, 9, 2])
    assert fill_row(lengths, 160, 10) == [0, 1, 5]
    assert fill_row(lengths, 160, 2) == [0, 1]
    assert fill_row(lengths, 80, 10) == [1, 5, 6]
    assert fill_row(lengths, 1, 10) == []
    assert fill_row(lengths, 10**6, 10) == list(range(7))


@pytest.mark.parametrize("tokens", [["a"] * 5, ["a", "b", "a"], ["b", "a"]])
def test_every_token_is_replaced_by_another_one(tokens: list[str]) -> None:
    sample = np.array([ord(each) for each in tokens], np.int32)
    (other,) = _with_other_tokens([sample])
    assert (other != sample).all()
    assert other.dtype == sample.dtype


@pytest.mark.parametrize("kind", ["legacy", "first", "always"])
def test_a_text_that_has_its_first_and_last_tokens_gets_no_others(kind: str) -> None:
    tokenizer = made(kind)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    plain = tokens_of(tokenizer, {"text": "hello world"})
    assert plain[0][0] == tokenizer.bos_token_id
    assert plain[0][-1] == tokenizer.eos_token_id
    assert tokens_of(tokenizer, {"text": "hello world</s>"}) == plain
    whole = tokens_of(tokenizer, {"text": "<s>hello world</s>"})
    assert [whole[0].count(token) for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)] == [1, 1]
    prompted = tokens_of(tokenizer, {"prompt": "hello", "completion": " world"})
    assert tokens_of(tokenizer, {"prompt": "hello", "completion": " world</s>"}) == prompted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "tower"), [("git", "image_encoder"), ("phi4_multimodal", "extend")])
def test_towers_within_a_language_model_stay_as_they_are(family: str, tower: str) -> None:
    model = make_any(small_config(family))
    lora = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules=None, merge=False)
    options: Any = {"seed": 0, "gradient_checkpointing": False, "freeze": (), "precision": "fp32"}
    prepare_for_training(model, lora=None, **options)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen
    assert all(tower in name for name in frozen)
    adapted = prepare_for_training(make_any(small_config(family)), lora=lora, **options)
    assert not any(tower in name for name, weight in adapted.named_parameters() if weight.requires_grad)
    named = lora.model_copy(update={"target_modules": ("q_proj", "query", "qkv_proj")})
    adapted = prepare_for_training(make_any(small_config(family)), lora=named, **options)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained
    assert not any(tower in name for name in trained)


@pytest.mark.sqlite
def test_fp64_decides_without_mixing_short_and_long_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE computes them in another way."""
    monkeypatch.setitem(TOLERANCE, "fp32", -1.0)
    _write(tmp_path, ["abcdefg hi" * length for length in (1, 1, 2, 3, 4, 4, 5, 5)])
    make_any(long_rope()).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    data = small_data().model_copy(update={"examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, certificate=True)
    run = lay_any(tmp_path / "run", "phi3", spec, rule=FixedCount(micro_batches=2))
    run_to_end(run)
    [certificate] = events_of_kind(run, "certificate")
    assert certificate["data"]["error_in_fp64"] <= 1e-6


@pytest.mark.sqlite
def test_a_mixture_of_experts_that_mixes_samples_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its choices of experts are not counted, so they cannot be the reason for the difference."""
    plain = MixtralSparseMoeBlock.forward

    def mixing(self: Any, hidden_states: Tensor) -> Tensor:
        found: Tensor = plain(self, hidden_states)
        return found + 0.1 * hidden_states.mean(0, keepdim=True)

    monkeypatch.setattr(MixtralSparseMoeBlock, "forward", mixing)
    spec = make_spec(
        data=small_data(), max_steps=2, effective_batch_size=8, certificate=True, aux_scope="none"
    )
    run = lay_any(tmp_path / "run", "mixtral", spec, rule=FixedCount(micro_batches=2))
    with pytest.raises(CannotTrain, match="computes a sample differently beside other samples"):
        run_to_end(run)


def test_a_change_of_a_configuration_with_thousands_of_names_is_rejected_at_once(client: TestClient) -> None:
    root = "/gradient-accumulation/config"
    config = client.post(root, json={"accumulation_steps": 4}).json()["config_id"]
    answer = client.patch(f"{root}/{config}", json={f"x{number}": 0 for number in range(20_000)})
    assert answer.status_code == 422
    assert "20000 fields" in answer.text
    twice = client.patch(f"{root}/{config}", json={"micro_batch_size": 2, "batch_size": 4})
    assert "given twice" in twice.text
