"""Families without any rule of their own: planned, trained, certified and loaded again.

`make families` examines all of them (tests/benchmarks/results/families.md).
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from app.planning.families import FAMILIES, MULTIMODAL, NO_TEXT_MODELS, WITHOUT_SDPA, why_not_causal
from tests.benchmarks.families import error_in_fp64
from tests.harness.any_family import ALL, lay_any, make_any, small_config
from tests.harness.preferences import objective_spec, preference_data, write_preferences
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, raw_log, run_to_end
from workers.training.exceptions import CannotTrain
from workers.training.models.tiny_gpt2 import make_tokenizer

SPEC = make_spec(data=small_data(), max_steps=2, certificate=True, effective_batch_size=8)

DIVERSE = (
    "smollm3", "olmo3", "granite", "qwen3_next", "gpt_oss", "mamba2", "falcon_h1", "gemma3", "gptj", "doge",
)  # fmt: skip
"""Attention with windows, sinks and ALiBi-free rotations, state spaces, linear attention, hybrids, experts, a
tower for images, and routers that report nothing."""


def test_every_family_of_transformers_is_known() -> None:
    assert set(ALL) <= FAMILIES
    assert set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) >= MULTIMODAL
    assert not MULTIMODAL & FAMILIES


def test_families_without_sdpa_attention_are_known() -> None:
    classes = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    found = set()
    for family in (FAMILIES | MULTIMODAL).intersection(CONFIG_MAPPING):
        built = next((own[CONFIG_MAPPING[family]] for own in classes if CONFIG_MAPPING[family] in own), None)
        if built is not None and not built._supports_sdpa:
            found.add(family)
    assert found - WITHOUT_SCORES == WITHOUT_SDPA


def test_families_that_no_class_for_text_builds_are_known() -> None:
    known = {*ALL, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert not known & NO_TEXT_MODELS
    assert set(CONFIG_MAPPING) >= NO_TEXT_MODELS
    for family in NO_TEXT_MODELS:
        config = {"model_type": family, "architectures": ["SomeForConditionalGeneration"]}
        assert "learns text alone" in str(why_not_causal(config))


WITHOUT_SCORES = {"big_bird", "falcon_mamba", "mamba", "mamba2", "reformer", "rwkv", "xlstm"}
"""Families without attention, or with one that keeps no score for most pairs of positions."""


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
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "mixtral", "qwen3_next", "gpt_oss", "opt"])
def test_a_classifier_of_any_family_of_decoders_trains_exactly(tmp_path: Path, family: str) -> None:
    write_preferences(tmp_path / "data.jsonl", "classification", 16)
    data, objective = preference_data("classification", 16), objective_spec("classification")
    run = lay_any(tmp_path / "run", family, SPEC.model_copy(update={"data": data, "objective": objective}))
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    _, info = AutoModelForSequenceClassification.from_pretrained(run.model, output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "why"),
    [("bert", "one linear layer"), ("nanochat", "no class for sequence classification")],
)
def test_a_family_without_such_a_head_is_refused(tmp_path: Path, family: str, why: str) -> None:
    write_preferences(tmp_path / "data.jsonl", "reward", 16)
    data, objective = preference_data("reward", 16), objective_spec("reward")
    run = lay_any(tmp_path / "run", family, SPEC.model_copy(update={"data": data, "objective": objective}))
    with pytest.raises(CannotTrain, match=why):
        run_to_end(run)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    ["gemma3", "mistral3", "qwen3_vl", "qwen2_5_vl", "llava", "smolvlm", "internvl", "glm4v", "qwen3_vl_moe"],
)
def test_the_towers_of_a_model_for_images_stay_as_they_are(tmp_path: Path, family: str) -> None:
    run = lay_any(tmp_path / "run", family, SPEC)
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    check_towers(tmp_path / "model", run.model)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3_5", "llama4"])
def test_a_model_that_was_saved_with_towers_keeps_them(tmp_path: Path, family: str) -> None:
    """AutoModelForCausalLM would build only its language model."""
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(small_config(family))
    whole.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    run = lay_any(tmp_path / "run", family, SPEC)
    run_to_end(run)
    check_towers(tmp_path / "model", run.model)


def check_towers(before: Path, after: Path) -> None:
    """Checks that towers are bit-equal, that the language model was trained, and that all loads again."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    parts = ("vis", "projector", "connector", "mlp1", "aligner")
    towers = [name for name in old if any(part in name for part in parts)]
    assert towers
    assert all(torch.equal(old[name], new[name]) for name in towers)
    assert any(not torch.equal(old[name], new[name]) for name in old.keys() - towers)
    _, info = AutoModelForImageTextToText.from_pretrained(after, output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


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
    assert any("load-balancing loss" in event["message"] for event in events_of_kind(run, "changed"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "has_one"), [("jetmoe", True), ("dbrx", True), ("llama4_text", False)])
def test_a_load_balancing_loss_is_neither_dropped_silently_nor_invented(
    tmp_path: Path, family: str, has_one: bool
) -> None:
    """transformers has none for Llama 4, though its config has the fields of one."""
    run = lay_any(tmp_path / "run", family, SPEC)
    run_to_end(run)
    changed = [event["message"] for event in events_of_kind(run, "changed")]
    assert any("load-balancing loss is not supported" in message for message in changed) == has_one
    assert {line["aux_loss"] for line in raw_log(run)} == {None}
