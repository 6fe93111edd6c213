"""Unrolling a few layers to all of them gives the deep model's trace, allocation for allocation."""

from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.planning.catalogue import config_of
from tests.benchmarks.accuracy import FAMILIES
from workers.profiling.allocation_trace import AllocationTrace, peaks
from workers.profiling.allocator import replay
from workers.profiling.depth import Depth, depth_for, layers_in, period_of
from workers.profiling.profile import make_profile
from workers.profiling.simulate import Simulation

LORA = LoraSpec(r=8, alpha=16, dropout=0.0, target_modules=None, merge=False)


def traces(
    config: dict[str, Any], recipe: Recipe, rows: int = 2, sequence: int = 96
) -> tuple[AllocationTrace, AllocationTrace]:
    """Of four groups of layers, unrolled; and of all layers."""
    layers = layers_in(config)
    depth = depth_for(layers, period_of(config, sequence))
    assert depth.traced < layers, "nothing to unroll"
    shallow = Simulation(config, recipe, depth).whole(rows, sequence)
    return shallow, Simulation(config, recipe, Depth(layers, layers, 0)).whole(rows, sequence)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("gpt2", "llama", "mixtral") else pytest.mark.thorough)
        for name in FAMILIES
        if name != "gemma3"
    ],
)
def test_the_unrolled_tape_has_the_peaks_of_the_whole_model(family: str) -> None:
    unrolled, whole = traces(FAMILIES[family], Recipe(device="cuda", precision="bf16"))
    assert highest(unrolled) == highest(whole)
    assert replay(unrolled).allocated == replay(whole).allocated


def highest(trace: AllocationTrace) -> int:
    return max(peak.bytes for peak in peaks(trace))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"precision": "fp32", "gradient_checkpointing": True}),
        ("llama", {"precision": "bf16", "lora": LORA}),
        ("gpt2", {"precision": "bf16", "lora": LORA, "gradient_checkpointing": True}),
        ("llama", {"precision": "bf16", "lora": LORA, "quantised": True}),
        ("llama", {"precision": "pure_bf16", "optimizer": "adafactor"}),
        ("opt", {"precision": "fp32", "optimizer": "lamb"}),
        ("qwen3", {"precision": "fp32", "optimizer": "adamw_8bit"}),
        ("llama", {"precision": "fp16", "packing": True, "label_smoothing": True}),
        ("llama", {"precision": "bf16", "accumulate_on_cpu": True}),
        ("mixtral", {"precision": "bf16", "aux_scope": "none", "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_the_unrolled_peak_is_exact_for_every_option(family: str, options: dict[str, Any]) -> None:
    unrolled, whole = traces(FAMILIES[family], Recipe(device="cuda", **options))
    assert highest(unrolled) == pytest.approx(highest(whole), rel=1e-5)  # LAMB keeps a scalar a parameter
    assert replay(unrolled).peak_reserved == pytest.approx(replay(whole).peak_reserved, rel=0.005)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-32B"])
def test_large_models_are_predicted_from_four_layers(name: str) -> None:
    config = config_of(name)
    assert config is not None
    unrolled, whole = traces(config, Recipe(device="cuda", precision="bf16"), 8, 1024)
    one, other = highest(unrolled), highest(whole)
    print(f"{name}, 8 × 1024: {one / 2**30:.3f} GiB from four layers, {other / 2**30:.3f} from all")
    assert one == pytest.approx(other, rel=0.005)


@pytest.mark.thorough
def test_alternating_kinds_of_layers_are_grouped_by_period() -> None:
    gemma = {**FAMILIES["gemma2"], "sliding_window": 64, "num_hidden_layers": 14}
    assert period_of(gemma, 64) == 1  # no longer than the window: all alike
    assert period_of(gemma, 65) == 2
    assert period_of({**FAMILIES["gemma3"], "num_hidden_layers": 40}, 128) == 6
    unrolled, whole = traces(gemma, Recipe(device="cuda", precision="bf16"))
    assert highest(unrolled) == highest(whole)
    assert replay(unrolled).allocated == replay(whole).allocated


@pytest.mark.thorough
def test_a_model_that_cannot_be_unrolled_is_traced_at_full_depth() -> None:
    recipe = Recipe(device="cuda", precision="bf16", aux_scope="sequence")
    profile = make_profile(FAMILIES["mixtral"], recipe, 96)
    whole = Simulation(FAMILIES["mixtral"], recipe, Depth(7, 7, 0)).whole(1, 96)
    line = max(profile.curve.stretches[0].accumulating, key=lambda line: line.bytes(1))
    assert line.bytes(1) == highest(whole)
