"""Families without any rule of their own: planned, trained, certified and loaded again.

`make families` examines all of them (tests/benchmarks/results/families.md).
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.planning.families import FAMILIES
from tests.benchmarks.families import error_in_fp64
from tests.harness.any_family import ALL, lay_any, make_any, small_config
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end
from workers.training.exceptions import CannotTrain

SPEC = make_spec(data=small_data(), max_steps=2, certificate=True, effective_batch_size=8)

DIVERSE = (
    "smollm3", "olmo3", "granite", "qwen3_next", "gpt_oss", "mamba2", "falcon_h1", "gemma3", "gptj", "doge",
)  # fmt: skip
"""Attention with windows, sinks and ALiBi-free rotations, state spaces, linear attention, hybrids, experts, a
tower for images, and routers that report nothing."""


def test_every_family_of_transformers_is_known() -> None:
    assert set(ALL) <= FAMILIES


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of the models' own code
@pytest.mark.parametrize("family", DIVERSE)
def test_a_family_without_a_rule_trains_exactly(tmp_path: Path, family: str) -> None:
    run = lay_any(tmp_path / "run", family, SPEC)
    outcome = run_to_end(run)
    assert outcome.steps == 2
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    _, info = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["smollm3", "olmo3", "gpt_oss", "falcon_h1", "granite"])
def test_splits_of_a_window_agree_in_fp64(family: str) -> None:
    assert error_in_fp64(make_any(small_config(family), torch.float64)) <= 1e-12


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_tower_of_a_model_for_images_stays_as_it_is(tmp_path: Path) -> None:
    run = lay_any(tmp_path / "run", "gemma3", SPEC)
    before = load_file(tmp_path / "model" / "model.safetensors")
    run_to_end(run)
    after = load_file(run.model / "model.safetensors")
    tower = [name for name in before if "vision" in name or "projector" in name]
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    text = [name for name in before if name not in tower]
    assert any(not torch.equal(before[name], after[name]) for name in text)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_sees_later_tokens_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="depend on the tokens after them"):
        run_to_end(lay_any(tmp_path / "run", "cpmant", SPEC))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_routers_that_report_nothing_are_trained_without_balance(tmp_path: Path) -> None:
    run = lay_any(tmp_path / "run", "flint", SPEC)
    run_to_end(run)
    assert any("balance loss" in event["message"] for event in events_of_kind(run, "changed"))
