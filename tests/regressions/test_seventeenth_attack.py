"""Regression tests for the seventeenth attack."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.planning.architectures import from_config
from tests.harness.any_family import lay_any, make_any, small_config
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end
from workers.run_directory import RunDirectory
from workers.training.exceptions import CannotTrain
from workers.training.models.tiny_gpt2 import make_tokenizer

SPEC = make_spec(data=small_data(), max_steps=2, certificate=True, effective_batch_size=8)


def laid(folder: Path, family: str, plan: dict[str, Any] | None = None, **fields: Any) -> RunDirectory:
    """A run directory for a small model of a family, with fields of its config.json changed."""
    config = small_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    make_any(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return lay_any(folder / "run", family, SPEC, **(plan or {}))


def with_config(folder: Path, family: str, **fields: Any) -> RunDirectory:
    """A run directory for a model whose config.json was changed after its weights were made."""
    run = laid(folder, family)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return run


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_a_model_that_sees_later_tokens_is_rejected_in_every_precision(
    tmp_path: Path, precision: str
) -> None:
    with pytest.raises(CannotTrain, match="depend on the tokens after them") as caught:
        run_to_end(laid(tmp_path, "llama", {"precision": precision}, is_causal=False))
    assert caught.value.code == "not_causal"


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_a_causal_model_is_accepted_in_low_precision(tmp_path: Path, family: str, precision: str) -> None:
    assert run_to_end(laid(tmp_path, family, {"precision": precision})).steps == 2


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"head_dim": 0}),
        ("bart", {"dropout": 3}),
        ("roberta", {"max_position_embeddings": 20, "is_decoder": True}),
        ("openai-gpt", {"n_head": 0}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 10**9]]}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("falcon_mamba", {"time_step_rank": -1}),
        ("megatron-bert", {"chunk_size_feed_forward": "x", "is_decoder": True}),
        ("reformer", {}),
        ("xmod", {"is_decoder": True}),
    ],
)
def test_an_impossible_config_fails_once_with_the_reason(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(CannotTrain) as caught:
        run_to_end(with_config(tmp_path, family, **fields))
    assert caught.value.code in ("model_fails", "model_not_loaded", "max_length")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_field_of_the_config_is_named_and_not_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="intermediate_size"):
        run_to_end(with_config(tmp_path, "llama", intermediate_size="12"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_is_not_finite_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="not finite"):
        run_to_end(with_config(tmp_path, "granite", logits_scaling=0.0))


def test_roberta_s_positions_begin_after_the_padding_token() -> None:
    config = small_config("roberta").to_dict()
    assert from_config(config).positions == config["max_position_embeddings"] - config["pad_token_id"] - 1
