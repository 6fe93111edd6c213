"""Profiles, compared with the real trainer and with other traces."""

from pathlib import Path

import pytest

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.estimate import ByFormula, ByProfile, largest_micro_batch
from app.planning.memory import workspace_bytes
from tests.benchmarks.accuracy import FAMILIES, Case, predicted_bytes, true_bytes
from workers.profiling.allocation_trace import peaks
from workers.profiling.depth import Depth, depth_for, layers_in
from workers.profiling.profile import make_profile
from workers.profiling.simulate import Simulation


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", rows=2, sequence=64),
        pytest.param(
            Case("gpt2", rows=2, sequence=64, options={"method": "lora", "checkpointing": True}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case("mixtral", rows=2, sequence=64, options={"precision": "bf16"}), marks=pytest.mark.slow
        ),
        pytest.param(Case("llama", rows=2, sequence=64, options={"classes": 3}), marks=pytest.mark.slow),
        pytest.param(
            Case("gpt2", rows=2, sequence=64, options={"classes": 3, "method": "lora"}),
            marks=pytest.mark.slow,
        ),
        Case("gpt2", rows=2, sequence=64, micro_batches=1, ranks=2),
        pytest.param(
            Case("llama", rows=2, sequence=64, ranks=3, strategy="fsdp", options={"checkpointing": True}),
            marks=pytest.mark.slow,
        ),
        Case("gpt2", rows=2, sequence=64, ranks=2, strategy="fsdp"),
    ],
    ids=lambda case: f"{case.family} {case.label}",
)
def test_the_peak_is_that_of_the_real_trainer(case: Case, tmp_path: Path) -> None:
    true = true_bytes(case, tmp_path / "run")
    assert predicted_bytes(case, true) == pytest.approx(true["bytes"], rel=0.01)


@pytest.mark.thorough
def test_the_curve_equals_traces_at_other_micro_batches() -> None:
    recipe = Recipe(device="cuda", precision="bf16")
    profile = make_profile(FAMILIES["llama"], recipe, 128)
    layers = layers_in(FAMILIES["llama"])
    whole = Simulation(FAMILIES["llama"], recipe, Depth(layers, layers, 0))
    estimate = ByProfile(profile.curve, recipe, "simulated")
    for rows, off in ((1, 1e-6), (3, 0.015), (7, 1e-6), (48, 1e-6)):  # within one chunk of logits it bends
        true = max(peak.bytes for peak in peaks(whole.whole(rows, 128)))
        memory = estimate.memory(rows)
        assert memory.peak_allocated_bytes - workspace_bytes("cuda") == pytest.approx(true, rel=off)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_layers_of_a_divided_model_repeat(checkpointing: bool) -> None:
    """Although what one layer fetches ahead or sums late belongs to the next."""
    recipe = Recipe(device="cuda", precision="bf16", parts=4, gradient_checkpointing=checkpointing)
    config = {**FAMILIES["llama"], "num_hidden_layers": 12}
    depth = depth_for(12, 1)
    assert depth.copies
    shallow, whole = Simulation(config, recipe, depth), Simulation(config, recipe, Depth(1, 12, 0))
    for rows in (2, 5):
        found, true = (max(peak.bytes for peak in peaks(each.whole(rows, 64))) for each in (shallow, whole))
        assert found == true


@pytest.mark.parametrize(
    "parts", [pytest.param(1, id="whole"), pytest.param(4, id="divided", marks=pytest.mark.thorough)]
)
def test_gradient_checkpointing_keeps_no_converted_weights(parts: int) -> None:
    """The backward pass converts each layer's weights again, so that a copy of all would be of no use."""
    config = {**FAMILIES["llama"], "num_hidden_layers": 12, "hidden_size": 320, "intermediate_size": 512}
    weights = []
    for checkpointing in (True, False):
        recipe = Recipe(device="cuda", precision="bf16", parts=parts, gradient_checkpointing=checkpointing)
        curve = make_profile(config, recipe, 64).curve
        weights.append(ByProfile(curve, recipe, "simulated").memory(64).weights_bytes)
    layers = curve.parameters - 2 * config["vocab_size"] * config["hidden_size"]
    assert weights[0] < weights[1] - 1.5 * layers


@pytest.mark.thorough
def test_a_divided_model_needs_less_memory_on_more_ranks() -> None:
    estimates = [
        ByProfile(make_profile(TINY_GPT2, recipe, 64).curve, recipe, "simulated")
        for recipe in (Recipe(device="cuda", precision="fp32", parts=parts) for parts in (1, 2, 4))
    ]
    peaks_by_parts = [estimate.memory(1).peak_allocated_bytes for estimate in estimates]
    assert peaks_by_parts == sorted(peaks_by_parts, reverse=True)
    states = [estimate.memory(1).optimizer_bytes for estimate in estimates]
    assert states[0] / 4 <= states[2] <= 1.1 * states[0] / 4


def test_one_micro_batch_needs_less_memory_than_accumulating() -> None:
    recipe = Recipe(device="cuda", precision="bf16")
    estimate = ByProfile(make_profile(TINY_GPT2, recipe, 256).curve, recipe, "simulated")
    for rows in (1, 8, 64):
        once = estimate.memory(rows, accumulating=False).peak_allocated_bytes
        assert once < estimate.memory(rows).peak_allocated_bytes
    for gigabytes in (1, 8):
        rows = largest_micro_batch(estimate, gigabytes * 2**30)
        assert estimate.memory(rows).peak_process_bytes <= gigabytes * 2**30
        assert estimate.memory(rows + 1).peak_process_bytes > gigabytes * 2**30


@pytest.mark.parametrize(
    ("freeze", "targets"),
    [
        pytest.param(("model.layers.[0-3].*",), None, marks=pytest.mark.thorough),
        pytest.param(("model.layers.6.*",), None, marks=pytest.mark.thorough),
        ((), ["3.self_attn.q_proj"]),
    ],
    ids=["the first layers are frozen", "the last one is frozen", "one layer has adapters"],
)
def test_layers_that_are_treated_differently_are_simulated_one_by_one(
    freeze: tuple[str, ...], targets: list[str] | None
) -> None:
    lora = targets and LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=tuple(targets), merge=False)
    recipe = Recipe(device="cpu", precision="fp32", freeze=freeze, lora=lora or None)
    config = {**FAMILIES["llama"], "num_hidden_layers": 7}
    profile = make_profile(config, recipe, 64)
    whole = Simulation(config, recipe, Depth(7, 7, 0))
    assert profile.curve.trainable == whole.trainable
    predicted = ByProfile(profile.curve, recipe, "simulated").memory(2).peak_allocated_bytes
    true = max(peak.bytes for peak in peaks(whole.whole(2, 64)))
    assert predicted - workspace_bytes("cpu") == pytest.approx(true, rel=1e-6)


def test_parameters_are_counted_at_the_whole_depth() -> None:
    profile = make_profile(FAMILIES["llama"], Recipe(device="cpu", precision="fp32"), 64)
    assert profile.curve.parameters == from_config(FAMILIES["llama"]).parameters
    assert profile.curve.trainable == profile.curve.parameters


@pytest.mark.thorough
def test_formula_and_simulation_agree_within_40_percent() -> None:
    """The formula is rough, and no more than that: within two fifths of the simulation."""
    for precision in ("fp32", "bf16"):
        recipe = Recipe(device="cuda", precision=precision)
        config = FAMILIES["llama"]
        simulated = ByProfile(make_profile(config, recipe, 512).curve, recipe, "simulated").memory(8)
        formula = ByFormula(from_config(config), recipe, 512).memory(8)
        assert formula.peak_allocated_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=0.4)
