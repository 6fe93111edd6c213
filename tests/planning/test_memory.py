from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.planning.architectures import from_config, named
from app.planning.devices import GIB
from app.planning.estimate import ByFormula, Estimate, comparable_estimates, largest_micro_batch
from app.planning.memory import Memory, lora_parameters, step_memory

GPT2 = named("gpt2")
assert GPT2 is not None
BF16 = Recipe(device="cuda", precision="bf16")


def changed(**fields: Any) -> Recipe:
    return BF16.model_copy(update=fields)


@given(budget=st.integers(1, 200), sequence=st.integers(2, 1024))
def test_the_largest_micro_batch_fits_and_one_more_does_not(budget: int, sequence: int) -> None:
    rows = largest_micro_batch(ByFormula(GPT2, BF16, sequence), budget * GIB)
    if rows:
        assert step_memory(GPT2, BF16, rows, sequence).peak_process_bytes <= budget * GIB
    assert step_memory(GPT2, BF16, rows + 1, sequence).peak_process_bytes > budget * GIB


def test_weights_gradients_and_adam_states_are_sixteen_bytes_a_parameter_in_fp32() -> None:
    memory = step_memory(GPT2, changed(precision="fp32"), 1, 2)
    total = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert total == 16 * GPT2.parameters


@pytest.mark.parametrize("off", [0.5, 1.0, 3.0])
def test_estimates_from_different_sources_are_compared_by_formula_ratio(off: float) -> None:
    known = ByPoint(off)

    def estimates(recipe: Recipe, sequence: int) -> Estimate:
        return known if recipe == BF16 else ByFormula(GPT2, recipe, sequence)

    beside = comparable_estimates(estimates, GPT2, BF16, 512)
    assert beside(BF16, 512) is known
    plain = step_memory(GPT2, BF16, 4, 512).peak_process_bytes
    for fields in ({"gradient_checkpointing": True}, {"optimizer": "sgd"}, {"precision": "fp32"}):
        recipe = changed(**fields)
        estimate = beside(recipe, 512)
        formula = step_memory(GPT2, recipe, 4, 512).peak_process_bytes
        own = estimate.memory(4).peak_process_bytes / known.memory(4).peak_process_bytes
        assert own == pytest.approx(formula / plain, rel=1e-6)
        assert estimate.source == "formula"


@dataclass
class ByPoint:
    """Acts as a simulation that predicts `off` times what the formula predicts."""

    off: float
    source: Literal["simulated"] = "simulated"
    expected_error: float | None = None

    def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
        return scaled(step_memory(GPT2, BF16, rows, 512), self.off)


def scaled(memory: Memory, factor: float, *names: str) -> Memory:
    """Parts of memory, or all of them, multiplied by `factor`."""
    parts = {
        name: round(factor * size)
        for name, size in memory
        if name.endswith("_bytes") and (not names or name in names)
    }
    return memory.model_copy(update=parts)


def test_a_change_of_activations_is_compared_by_the_error_of_activations() -> None:
    """A formula whose activations are half of the true ones, and whose weights are right."""

    class Simulated(ByPoint):
        def memory(self, rows: float, *, accumulating: bool = True) -> Memory:
            names = ("activations_bytes", "logits_bytes", "workspace_bytes")
            return scaled(step_memory(GPT2, BF16, rows, 512), self.off, *names)

    known = Simulated(2.0)

    def estimates(recipe: Recipe, sequence: int) -> Estimate:
        return known if recipe == BF16 else ByFormula(GPT2, recipe, sequence)

    checkpointed = changed(gradient_checkpointing=True)
    found = comparable_estimates(estimates, GPT2, BF16, 512)(checkpointed, 512).memory(32)
    formula = step_memory(GPT2, checkpointed, 32, 512)
    assert found.activations_bytes == 2 * formula.activations_bytes
    assert found.weights_bytes == formula.weights_bytes
    assert found.peak_process_bytes < known.memory(32).peak_process_bytes / 3


def test_each_memory_option_changes_the_estimate_as_expected() -> None:
    plain = step_memory(GPT2, BF16, 8, 1024).peak_process_bytes
    assert step_memory(GPT2, changed(gradient_checkpointing=True), 8, 1024).peak_process_bytes < plain
    assert step_memory(GPT2, changed(optimizer="sgd"), 8, 1024).peak_process_bytes < plain
    assert step_memory(GPT2, changed(precision="fp32"), 8, 1024).peak_process_bytes > plain
    assert step_memory(GPT2, changed(attention="eager"), 8, 1024).peak_process_bytes > plain


def test_no_micro_batch_fits_into_one_mebibyte() -> None:
    assert largest_micro_batch(ByFormula(GPT2, BF16, 1024), 2**20) == 0


def test_frozen_layers_with_adapters_use_autocast_precision_but_embeddings_do_not() -> None:
    llama = named("meta-llama/Llama-3.1-8B")
    assert llama is not None
    lora = LoraSpec(r=16, alpha=32, dropout=0.0, target_modules=None, merge=False)
    weights = step_memory(llama, changed(lora=lora), 1, 1024).weights_bytes
    embedding = llama.vocabulary * llama.hidden_size
    assert weights > 2 * llama.parameters + 2 * embedding
    assert weights < 2 * llama.parameters + 6 * embedding
    merging = lora.model_copy(update={"merge": True})
    assert step_memory(llama, changed(lora=merging), 1, 1024).weights_bytes > 6 * llama.parameters
    recomputed = changed(lora=merging, gradient_checkpointing=True)
    assert step_memory(llama, recomputed, 1, 1024).weights_bytes < 4.4 * llama.parameters


def test_experts_of_some_layers_are_not_counted_in_all() -> None:
    """Llama 4 Maverick has experts in every second layer."""
    config = {
        "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "vocab_size": 202048, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    maverick = from_config(config)
    lora = LoraSpec(r=16, alpha=32, dropout=0.0, target_modules=None, merge=False)
    recipe = Recipe(device="cuda", precision="bf16", lora=lora, gradient_checkpointing=True)
    trained = lora_parameters(maverick, lora)
    weights = step_memory(maverick, recipe, 1, 512).weights_bytes
    assert 3.6 * maverick.parameters < weights < 4.1 * maverick.parameters + 6 * trained
    all_layers = lora_parameters(maverick.model_copy(update={"parameters": 10**13}), lora)
    assert 0.45 < trained / all_layers < 0.6
