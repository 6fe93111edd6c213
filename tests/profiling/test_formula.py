"""The formula, which answers where there is no simulation, beside the simulation."""

from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.planning.architectures import from_config
from app.planning.catalogue import CATALOGUE
from app.planning.estimate import ByFormula, ByProfile
from tests.harness.kept_activations import default_config
from workers.profiling.profile import make_profile

LEAST, MOST = 0.93, 1.25
"""What the formula may predict, relative to the simulation: too little would end in a lack of memory."""

SEQUENCE = 512


FAMILIES = (
    "gpt2", "llama", "qwen3", "mixtral", "gemma2", "gemma3_text", "gpt_neox", "opt", "bloom", "falcon",
)  # fmt: skip
"""Those whose layers differ."""


def model_of(family: str) -> str:
    """The first model of a family in the catalogue, but not the tiny one, whose memory is mostly CUDA's."""
    return next(
        name
        for name, config in CATALOGUE.items()
        if config["model_type"] == family and name != "accrue/tiny-gpt2"
    )


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(device="cuda", precision="bf16"), id="bf16"),
        pytest.param(Recipe(device="cuda", precision="fp32"), id="fp32", marks=pytest.mark.thorough),
        pytest.param(
            Recipe(device="cuda", precision="bf16", gradient_checkpointing=True),
            id="checkpointing",
            marks=pytest.mark.thorough,
        ),
    ],
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family == "qwen3" else pytest.mark.thorough) for family in FAMILIES],
)
def test_the_formula_is_close_to_the_simulation(family: str, recipe: Recipe) -> None:
    config = CATALOGUE[model_of(family)]
    simulated = ByProfile(make_profile(config, recipe, SEQUENCE).curve, recipe, "simulated")
    formula = ByFormula(from_config(config), recipe, SEQUENCE)
    for rows in (1, 8, 16):
        own, true = (each.memory(rows).peak_process_bytes for each in (formula, simulated))
        assert LEAST <= own / true <= MOST, (rows, own / true)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["minicpm3", "falcon_h1", "biogpt"])
def test_families_outside_the_catalogue_keep_what_was_simulated(family: str) -> None:
    """Compared with Llama, latent attention keeps more, state spaces far more, and layers without a gate
    less."""
    config, recipe = default_config(family), Recipe(device="cuda", precision="bf16")
    simulated = ByProfile(make_profile(config, recipe, SEQUENCE).curve, recipe, "simulated")
    formula = ByFormula(from_config(config), recipe, SEQUENCE)
    for rows in (1, 8, 64):
        own, true = (each.memory(rows).peak_process_bytes for each in (formula, simulated))
        assert LEAST <= own / true <= MOST, (rows, own / true)


CODEGEN = {
    "model_type": "codegen", "n_layer": 20, "n_embd": 1024, "n_head": 16, "n_positions": 2048, "n_ctx": 2048,
    "vocab_size": 51200, "rotary_dim": 32, "architectures": ["CodeGenForCausalLM"],
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CODEGEN, id="codegen"),
        pytest.param(CATALOGUE[model_of("bloom")], id="bloom", marks=pytest.mark.thorough),
    ],
)
def test_scores_of_eager_attention_count_in_long_samples(config: dict[str, Any], checkpointing: bool) -> None:
    """Models without any other attention keep a score for each pair of positions. (Of reserved memory, large
    blocks leave different parts unused.)"""
    recipe = Recipe(device="cuda", precision="bf16", gradient_checkpointing=checkpointing)
    simulated = ByProfile(make_profile(config, recipe, 2048).curve, recipe, "simulated")
    formula = ByFormula(from_config(config), recipe, 2048)
    for rows in (1, 8):
        own, true = (each.memory(rows).peak_allocated_bytes for each in (formula, simulated))
        assert LEAST <= own / true <= MOST, (rows, own / true)
