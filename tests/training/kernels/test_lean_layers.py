"""Norms and rotary embeddings with backward passes of their own compute what the model's own layers do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from transformers import AutoModelForCausalLM, CohereConfig, GemmaConfig, LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama

from tests.harness.any_family import lay_any
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, weights
from workers.training import start
from workers.training.kernels import lean_layers

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64}  # fmt: skip


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms are ones or zeros at first
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("weight_is_trained", [True, False])
def test_the_norm_s_derivative_is_that_of_its_value(shape: tuple[int, ...], weight_is_trained: bool) -> None:
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=weight_is_trained)
    assert gradcheck(lean_layers._Norm.apply, (states, weight, 1e-5))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_rotation_s_derivative_is_that_of_its_value(is_transposed: bool) -> None:
    states = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    given = states.transpose(1, 2) if is_transposed else states
    cosines, sines = (torch.randn(2, 1, given.shape[2], 8, dtype=torch.float64) for _ in range(2))
    assert gradcheck(lambda each: lean_layers._Rotation.apply(each, cosines, sines), (given,))


@pytest.mark.parametrize(
    ("config", "norms", "turns"),
    [
        (LlamaConfig(**SIZES), 5, True),
        (Qwen3Config(**SIZES, head_dim=8), 9, True),  # also of queries and keys
        (GemmaConfig(**SIZES, head_dim=8), 0, True),  # norms with 1 + weight
        (CohereConfig(**SIZES, pad_token_id=0), 0, False),  # pairs of neighbours are rotated; other norms
    ],
    ids=["llama", "qwen3", "gemma", "cohere"],
)
def test_layers_that_compute_something_else_are_left_as_they_are(
    config: Any, norms: int, turns: bool
) -> None:
    model = model_of(config)
    assert len(lean_layers.suitable_norms(model)) == norms
    assert bool(lean_layers.suitable_rotary(model)) == turns


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES, head_dim=8)], ids=["llama", "qwen3"]
)
def test_a_model_s_gradient_stays_the_same(config: Any) -> None:
    model, ids = model_of(config), torch.randint(0, 61, (3, 17))

    def gradient() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    own = gradient()
    spaces = lean_layers.suitable_rotary(model)
    before = [space[lean_layers.ROTARY] for space in spaces]
    try:
        lean_layers.use(lean_layers.suitable_norms(model), spaces)
        replaced = gradient()
    finally:
        for space, function in zip(spaces, before, strict=True):
            space[lean_layers.ROTARY] = function
    assert any(not torch.equal(own[name], replaced[name]) for name in own)  # in the last digits
    for name, expected in own.items():
        torch.testing.assert_close(replaced[name], expected, rtol=1e-4, atol=1e-6)


def test_other_precisions_use_the_model_s_own_layers() -> None:
    model = model_of(LlamaConfig(**SIZES))
    norm = model.model.norm
    lean_layers.use({norm: 1e-6}, [])
    model.double()
    states = torch.randn(2, 3, 32, dtype=torch.float64)
    assert norm(states).dtype == torch.float64
    torch.testing.assert_close(norm(states), type(norm).forward(norm, states), rtol=0, atol=0)


@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_a_job_on_a_cpu_uses_them_unless_its_kernels_are_to_stay(tmp_path: Path, kernels: str) -> None:
    before = modeling_llama.apply_rotary_pos_emb
    run = lay_any(tmp_path / "run", "llama", make_spec(data=small_data(), kernels=kernels, max_steps=2))
    run_to_end(run)
    events = events_of_kind(run, "kernels")
    assert len(events) == (kernels == "auto")
    for event in events:
        assert event["data"]["used"]
        assert "norms and rotary embeddings" in event["message"]
        assert event["data"]["gradient_error"] < 1e-5
    assert modeling_llama.apply_rotary_pos_emb is before  # for whatever the process does next


def test_training_with_them_is_the_same_up_to_rounding(tmp_path: Path) -> None:
    logs = []
    for kernels in ("auto", "none"):
        (tmp_path / kernels).mkdir()
        spec = make_spec(data=small_data(), kernels=kernels, max_steps=6)
        run = lay_any(tmp_path / kernels / "run", "llama", spec)
        run_to_end(run)
        logs.append(raw_log(run))
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def resumed(folder: Path, kernels: str = "auto") -> dict[str, torch.Tensor]:
    """The weights of a run that is interrupted at its third step and resumed."""
    spec = make_spec(data=small_data(), kernels=kernels, max_steps=6)
    run = lay_any(folder / "run", "llama", spec)
    interrupted_at(run, 9)
    assert 0 < len(raw_log(run)) < 6
    run_to_end(lay_any(folder / "run", "llama", spec, attempt=2))
    return weights(run)


def whole(folder: Path, kernels: str = "auto") -> dict[str, torch.Tensor]:
    run = lay_any(folder / "run", "llama", make_spec(data=small_data(), kernels=kernels, max_steps=6))
    run_to_end(run)
    return weights(run)


def test_a_resumed_run_uses_them_without_another_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comparison, with trained weights, could have another result."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    expected = whole(tmp_path / "whole")
    compared = []
    compare = lean_layers.use_if_it_agrees
    monkeypatch.setattr(
        lean_layers, "use_if_it_agrees", lambda *given: (compared.append(given), compare(*given))
    )
    found = resumed(tmp_path / "resumed")
    assert len(compared) == 1
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_of_an_earlier_version_goes_on_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    expected = whole(tmp_path / "whole", "none")
    choose, calls = start.choose_lean_layers, []

    def from_the_second_attempt_on(*given: Any, **named: Any) -> None:
        calls.append(named)
        if len(calls) > 1:
            choose(*given, **named)

    monkeypatch.setattr(start, "choose_lean_layers", from_the_second_attempt_on)
    found = resumed(tmp_path / "resumed")
    assert len(calls) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
