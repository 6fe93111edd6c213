"""Which weights have adapters by default, in families whose layers are not all plain linear ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import LoraSpec, ModelLayer
from app.contract.spec import MethodSpec
from app.planning.architectures import from_config
from app.planning.memory import lora_parameters
from tests.harness.any_family import lay_any, make_any, small_config
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end
from workers.training.exceptions import CannotTrain
from workers.training.models.adapters import default_targets, with_adapters
from workers.training.models.trainable import prepare_for_training
from workers.training.models.trained_weights import with_saved_adapters

LORA = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' own code


def adapted(family: str, lora: LoraSpec = LORA) -> set[str]:
    """The last two parts of the names of everything that has adapters."""
    names = [name for name, _ in with_adapters(make_any(small_config(family)), lora, 0).named_parameters()]
    modules = {name.split(".lora_A")[0].replace(".base_layer", "") for name in names if ".lora_A" in name}
    return {".".join(name.split(".")[-2:]) for name in modules}


@pytest.mark.parametrize(
    ("family", "some"),
    [
        ("gpt2", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("mixtral", {"mlp.experts", "self_attn.q_proj"}),
        ("gpt_oss", {"mlp.experts", "self_attn.o_proj"}),
        ("qwen2_moe", {"mlp.experts", "shared_expert.gate_proj", "shared_expert.down_proj"}),
        ("deepseek_v3", {"mlp.experts", "shared_experts.up_proj", "self_attn.kv_b_proj"}),
        ("jetmoe", {"mlp.input_linear", "mlp.output_linear"}),
        ("llama4_text", {"feed_forward.experts", "shared_expert.down_proj"}),
        ("mamba2", {"mixer.in_proj"}),
        ("falcon_h1", {"mamba.in_proj", "self_attn.q_proj", "feed_forward.down_proj"}),
    ],
)
def test_linear_layers_and_experts_have_adapters(family: str, some: set[str]) -> None:
    names = adapted(family)
    assert some <= names
    assert not any("router" in name or name.endswith(("lm_head", ".gate", "dt_proj")) for name in names)


def test_layers_whose_weights_go_into_a_kernel_have_no_adapters() -> None:
    assert not any("out_proj" in name for name in adapted("mamba2"))


def test_towers_have_no_adapters() -> None:
    model = with_adapters(make_any(small_config("gemma3")), LORA, 0)
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert names
    assert all("language_model" in name for name in names)


def test_dropout_leaves_the_experts_out_with_a_warning(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"dropout": 0.1})
    assert "mlp.experts" not in adapted("gpt_oss", lora)
    spec = make_spec(data=small_data(), max_steps=3, method=MethodSpec(name="lora", lora=lora))
    run = lay_any(tmp_path / "run", "gpt_oss", spec)
    run_to_end(run)
    assert any("experts are not adapted" in event["message"] for event in events_of_kind(run, "changed"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "olmoe"])
def test_the_estimate_of_the_adapters_is_their_number(family: str) -> None:
    config = small_config(family)
    architecture = from_config(config.to_dict())
    assert architecture is not None
    model = with_adapters(make_any(config), LORA, 0)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert lora_parameters(architecture, LORA) == trained


def test_a_target_that_names_no_module_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"no module is named 'v_projj'.*down_proj.*v_proj"):
        adapted("llama", LORA.model_copy(update={"target_modules": ("q_proj", "v_projj")}))
    assert adapted("llama", LORA.model_copy(update={"target_modules": ("self_attn.q_proj",)}))
    with pytest.raises(CannotTrain, match=r"no module is named 'v_projj' or 'c_attn'; the linear layers"):
        adapted("llama", LORA.model_copy(update={"target_modules": ("v_projj", "c_attn")}))


def test_an_adapted_head_is_saved_without_its_weights(tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"target_modules": ("lm_head", "q_proj")})
    spec = make_spec(data=small_data(), max_steps=2, method=MethodSpec(name="lora", lora=lora))
    run = lay_any(tmp_path / "run", "llama", spec)
    run_to_end(run)
    names = set(load_file(run.model / "adapter_model.safetensors"))
    assert any("lm_head.lora_A" in name for name in names)
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("with_weights", [False, True])  # as earlier versions saved them
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_a_head_are_loaded_again(tmp_path: Path, tied: bool, with_weights: bool) -> None:
    config = small_config("llama")
    config.tie_word_embeddings = tied
    model = make_any(config)
    lora = LORA.model_copy(update={"target_modules": ("lm_head", "q_proj")})
    adapted_model = with_adapters(copy.deepcopy(model), lora, 0)
    with torch.no_grad():
        for name, weight in adapted_model.named_parameters():
            if ".lora_" in name:
                weight.normal_()
    adapted_model.save_pretrained(tmp_path, save_embedding_layers=with_weights)
    layer = ModelLayer(
        name="a", job_id="ftjob-1", folder="model", lora=lora, fingerprint=fingerprint_of_files(tmp_path)
    )
    loaded = with_saved_adapters(copy.deepcopy(model), (layer, tmp_path))
    ids = torch.randint(3, 250, (1, 16))
    assert torch.equal(loaded.eval()(input_ids=ids).logits, adapted_model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("*.q_proj.weight", "q_proj"),
        ("model.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj"),
        ("*.norm.*", None),
        ("*.embed_tokens.weight", None),
    ],
)
def test_freezing_a_weight_freezes_its_adapters(pattern: str, frozen: str | None) -> None:
    model = make_any(small_config("llama"))
    options: Any = {"seed": 0, "gradient_checkpointing": False, "precision": "fp32"}
    prepared = prepare_for_training(model, lora=LORA, freeze=(pattern,), **options)
    for name, weight in prepared.named_parameters():
        is_frozen = ".lora_" not in name or (frozen is not None and f"{frozen}.lora_" in name)
        assert weight.requires_grad is not is_frozen, name


@pytest.mark.parametrize(
    ("family", "pattern", "frozen"),
    [
        ("qwen3_moe", "*lora_A*", {"lora_A"}),
        ("qwen3_moe", "*.experts.down_proj", {"experts.lora_A", "experts.lora_B"}),
        ("gpt_oss", "*bias", set()),
        ("gpt_oss", "*.gate_up_proj", {"experts.base_layer.lora_A", "experts.base_layer.lora_B"}),
    ],
)
def test_each_weight_of_experts_has_its_own_adapters(family: str, pattern: str, frozen: set[str]) -> None:
    model = make_any(small_config(family))
    options: Any = {"seed": 0, "gradient_checkpointing": False, "precision": "fp32"}
    prepared = prepare_for_training(model, lora=LORA, freeze=(pattern,), **options)
    names = {
        name for name, weight in prepared.named_parameters() if ".lora_" in name and not weight.requires_grad
    }
    assert bool(names) is bool(frozen)
    assert {part for part in frozen for name in names if part in name} == frozen
    assert all(any(part in name for part in frozen) for name in names)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_pattern_of_the_model_s_own_names_freezes_its_adapters(tmp_path: Path, method: str) -> None:
    own = MethodSpec(name="lora", lora=LORA) if method == "lora" else MethodSpec(name="full", lora=None)
    spec = make_spec(data=small_data(), max_steps=2, method=own, freeze=("model.layers.0.*",))
    run = lay_any(tmp_path / "run", "llama", spec)
    run_to_end(run)
    if method == "lora":
        trained = load_file(run.model / "adapter_model.safetensors")
        moved = {name for name, weight in trained.items() if ".lora_B" in name and weight.abs().max() > 0}
    else:
        before = load_file(tmp_path / "model" / "model.safetensors")
        trained = load_file(run.model / "model.safetensors")
        moved = {name for name, weight in trained.items() if not torch.equal(weight, before[name])}
    assert moved
    assert not any("layers.0." in name for name in moved)


@pytest.mark.thorough
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "falcon_h1", "phimoe", "jetmoe"])
def test_adapters_are_certified_trained_and_loaded_again(tmp_path: Path, family: str, merge: bool) -> None:
    lora = LORA.model_copy(update={"merge": merge})
    spec = make_spec(
        data=small_data(), max_steps=3, certificate=True, effective_batch_size=8,
        method=MethodSpec(name="lora", lora=lora),
    )  # fmt: skip
    run = lay_any(tmp_path / "run", family, spec)
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    if merge:
        trained = AutoModelForCausalLM.from_pretrained(run.model)
    else:
        trained = PeftModel.from_pretrained(copy.deepcopy(base), run.model)
    ids = torch.randint(3, 250, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = base(input_ids=ids, use_cache=False).logits
        change = trained.eval()(input_ids=ids, use_cache=False).logits - before
    assert change.abs().max() > 1e-4


def test_suffixes_are_short_and_match_nothing_else() -> None:
    targets = default_targets(make_any(small_config("llama")))
    assert targets.modules == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert targets.weights == []
