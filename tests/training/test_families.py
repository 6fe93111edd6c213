"""The whole trainer on model families that need special treatment."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, MixtralConfig, OPTConfig

from app.contract.plan import FixedCount, FixedSize, TokenBudget
from app.contract.spec import Spec
from tests.harness.runs import create_run, log_of, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, raw_log, run_to_end
from workers.run_directory import RunDirectory
from workers.training.models.tiny_gpt2 import make_tokenizer

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260,
    "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "mixtral": MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        router_aux_loss_coef=0.05, router_jitter_noise=0.1,
    ),
    "gemma2": Gemma2Config(**SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    "opt": OPTConfig(
        **SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.1,
        activation_function="gelu",  # in fp32 a ReLU at its kink is switched by the processor's rounding
    ),
}  # fmt: skip


def lay_family(folder: Path, family: str, spec: Spec, **plan: Any) -> RunDirectory:
    """A run directory for a small model of a family, with the built-in model's tokenizer."""
    model = folder.parent / family
    if not model.exists():
        import torch

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
    run = create_run(folder, spec, **plan)
    reference = spec.model.model_copy(update={"source": "local", "name": family})
    assignment = run.assignment()
    own = assignment.spec.model_copy(update={"model": reference})
    run.write_assignment(assignment.model_copy(update={"spec": own, "model_path": str(model)}))
    return run


@pytest.mark.parametrize("scope", ["window", "sequence"])
def test_a_mixture_of_experts_trains_the_same_in_every_split(tmp_path: Path, scope: Any) -> None:
    """The load-balancing loss is logged separately from the loss, and the certificate holds."""
    spec = make_spec(data=small_data(), max_steps=4, aux_scope=scope, certificate=True)
    spec = spec.model_copy(update={"gradient_checkpointing": scope == "sequence"})
    quiet = CONFIGS["mixtral"].to_dict() | {"router_jitter_noise": 0.0}
    whole = lay_family(tmp_path / "whole", "mixtral", spec, rule=FixedCount(micro_batches=1))
    MixtralConfig(**quiet).save_pretrained(tmp_path / "mixtral")
    split = lay_family(tmp_path / "split", "mixtral", spec, rule=FixedSize(samples=3))
    outcome = run_to_end(whole)
    run_to_end(split)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    for a, b in zip(raw_log(whole), raw_log(split), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["aux_loss"] == pytest.approx(a["aux_loss"], rel=1e-4)
        assert a["aux_loss"] > 0.04


def test_a_mixture_with_jitter_is_certified_without_it(tmp_path: Path) -> None:
    run = lay_family(
        tmp_path / "run", "mixtral", make_spec(data=small_data(), max_steps=2, certificate=True),
        rule=FixedSize(samples=4),
    )  # fmt: skip
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5


def test_a_model_without_a_balance_loss_gets_none(tmp_path: Path) -> None:
    run = lay_family(tmp_path / "run", "mixtral", make_spec(data=small_data(), max_steps=2, aux_scope="none"))
    run_to_end(run)
    assert [line["aux_loss"] for line in raw_log(run)] == [None, None]


def test_packing_falls_back_to_padding_if_attention_mixes_samples(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(packing=True), max_steps=2, certificate=True)
    run = lay_family(tmp_path / "run", "opt", spec, rule=TokenBudget(tokens=200))
    run_to_end(run)
    [changed] = events_of_kind(run, "changed")
    assert "padded instead" in changed["message"]
    assert any(line["padded_tokens"] > line["input_tokens"] for line in raw_log(run))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_does_not_affect_the_certificate(tmp_path: Path, checkpointing: bool) -> None:
    spec = make_spec(data=small_data(), max_steps=2, certificate=True, gradient_checkpointing=checkpointing)
    run = lay_family(tmp_path / "run", "opt", spec, rule=FixedSize(samples=4))
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5


def test_activations_are_recomputed_while_nothing_is_random(tmp_path: Path) -> None:
    """OPT has dropout in the very layers that are recomputed: it must be off, and each forward run twice."""
    import torch

    from workers.training.models.dropout import without_randomness
    from workers.training.models.trainable import recompute_activations

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["opt"]).train()
    recompute_activations(model)
    ids, forwards = torch.arange(20).unsqueeze(0), 0

    def counted(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.model.decoder.layers[0].fc1.register_forward_hook(counted)
    losses = []
    with without_randomness(model):
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
    assert forwards == 4
    assert losses[0] == losses[1]
    assert model.training
    assert all(module.training for module in model.modules())
    other = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for _ in range(2)]
    assert other[0] != other[1]


def test_a_model_without_sdpa_uses_eager_attention_and_reports_it(tmp_path: Path) -> None:
    """Gemma 2, whose attention scores and logits are soft-capped."""
    spec = make_spec(data=small_data(), max_steps=3, certificate=True)
    run = lay_family(tmp_path / "run", "gemma2", spec, rule=FixedSize(samples=4))
    run_to_end(run)
    assert "eager" in events_of_kind(run, "changed")[0]["message"]
    assert log_of(run)[-1]["loss"] < log_of(run)[0]["loss"]
    assert "model.embed_tokens.weight" in load_file(run.model / "model.safetensors")


def test_rounding_effects_are_distinguished_from_mixed_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the processor: with no tolerance at all in fp32, fp64 decides, and the job goes on."""
    from workers.training.models.precision import TOLERANCE

    monkeypatch.setitem(TOLERANCE, "fp32", -1.0)
    spec = make_spec(data=small_data(), max_steps=2, certificate=True)
    run = lay_family(tmp_path / "run", "opt", spec, rule=FixedSize(samples=4))
    run_to_end(run)
    [certificate] = events_of_kind(run, "certificate")
    assert certificate["level"] == "warning"
    assert certificate["data"]["error_in_fp64"] <= 1e-6
    assert len(log_of(run)) == 2
