"""Regression tests for the twenty-first attack, and for the twenty-second, on its fixes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app.contract.arguments import LoraConfig
from app.contract.data_formats import parse_line
from app.contract.model_fingerprint import TEMPLATES, fingerprint_of_files
from app.contract.model_reference import LoraSpec, ModelLayer
from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from app.contract.spec import MethodSpec
from tests.harness.any_family import lay_any, long_rope, make_any, small_config
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from tests.harness.tokenizers import made, tokens_of
from tests.harness.training import events_of_kind, run_to_end, weights
from workers.training.data.encoding import ExampleEncoder
from workers.training.exceptions import CannotTrain
from workers.training.micro_batches.batches import Buckets, cut_window
from workers.training.models.adapters import with_adapters
from workers.training.models.base_model import load_tokenizer
from workers.training.models.model_files import stage, weight_files
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2, make_tokenizer

pytestmark = pytest.mark.sqlite

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("tools", ["[]", " [ ] ", "null", "", [], None, " null"])
@pytest.mark.parametrize("field", ["tools", "functions"])
def test_an_empty_list_of_tools_is_none(field: str, tools: Any) -> None:
    _, chat = parse_line(json.dumps({**CHAT, field: tools}))
    assert chat.tools is None


def test_empty_cells_beside_a_text_are_ignored() -> None:
    form, _ = parse_line(json.dumps({"text": "a", "messages": None}))
    assert form == "text"
    turns = [CHAT["messages"][0], {**CHAT["messages"][1], "tool_calls": "[]"}]
    assert parse_line(json.dumps({"messages": turns}))[0] == "messages"


def test_every_special_token_before_a_text_is_trained_on() -> None:
    from tokenizers import processors

    tokenizer = made("first")
    two = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("a", "b")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a b $A", pair="a b $A $B", special_tokens=two
    )
    whole = tokenizer("q").input_ids
    tokens, counts = tokens_of(tokenizer, {"prompt": "q", "completion": "a"})
    assert whole[:2] == [number for _, number in two]
    assert tokens[: len(whole)] == whole
    assert not any(counts[: len(whole)])


def test_chats_with_tools_use_the_template_for_tools() -> None:
    tokenizer = made("first")
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": "TOOLS" + plain}
    lines = [CHAT, {**CHAT, "tools": TOOLS}, CHAT]
    with ExampleEncoder(tokenizer) as encoder:
        examples = [(number, parse_line(json.dumps(line))[1]) for number, line in enumerate(lines)]
        texts = [tokenizer.decode(tokens) for _, [(tokens, _)] in encoder.samples(examples)]
    assert ["TOOLS" in text.replace(" ", "") for text in texts] == [False, True, False]
    tokenizer.chat_template = {"tool_use": plain}
    with ExampleEncoder(tokenizer) as encoder, pytest.raises(CannotTrain, match="none named default"):
        list(encoder.samples(examples[:1]))


def test_further_templates_of_a_model_are_kept(tmp_path: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    ensure_tiny_gpt2(source)
    (source / TEMPLATES).mkdir()
    before = fingerprint_of_files(source)
    (source / TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    assert fingerprint_of_files(source) != before
    target = stage(source, tmp_path / "target")
    assert (target / TEMPLATES / "tool_use.jinja").read_text() == "{{ tools }}"
    outside.write_text("secret")
    (source / TEMPLATES / "other.jinja").symlink_to(outside)
    with pytest.raises(CannotTrain, match="leads out of its folder"):
        stage(source, tmp_path / "other")


def test_a_result_has_all_of_the_model_s_templates(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", make_tokenizer()
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": f"TOOLS{plain}"}
    make_any(small_config("llama")).save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert (model / TEMPLATES).is_dir()
    run = lay_any(tmp_path / "run", "llama", make_spec(data=small_data(), max_steps=2))
    outcome = run_to_end(run)
    assert sorted(outcome.files) == sorted(path.name for path in run.model.iterdir())
    assert all((run.model / name).is_file() for name in outcome.files)
    assert load_tokenizer(stage(run.model, tmp_path / "staged")).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_weights_that_are_not_plain_numbers_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    model = tmp_path / "model"
    ensure_tiny_gpt2(model)
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=1))
    run.write_assignment(run.assignment().model_copy(update={"model_path": str(model)}))
    weights = load_file(model / "model.safetensors")
    name = next(name for name, weight in weights.items() if weight.dim() == 2 and "attn" in name)
    weights[name] = weights[name].to(kind)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CannotTrain, match=f"{name} is"):
        run_to_end(run)


LORA = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(("module", "tied"), [("lm_head", True), ("embed_tokens", True), ("lm_head", False)])
def test_adapters_of_shared_weights_are_not_merged(tmp_path: Path, module: str, tied: bool) -> None:
    config = small_config("llama")
    config.tie_word_embeddings = tied
    adapters = LORA.model_copy(update={"target_modules": (module, "q_proj"), "merge": True})
    model = make_any(config)
    if tied:
        with pytest.raises(CannotTrain, match=f"{module} shares its weights"):
            with_adapters(model, adapters, 0)
    else:
        with_adapters(model, adapters, 0)
    with_adapters(make_any(config), adapters.model_copy(update={"merge": False}), 0)


def test_adapters_of_a_block_that_is_used_twice_are_merged() -> None:
    model = make_any(small_config("llama"))
    first, second = model.model.layers[:2]
    second.self_attn = first.self_attn
    with_adapters(model, LORA.model_copy(update={"merge": True}), 0).merge_and_unload()


def test_adapters_of_a_layer_that_is_used_twice_are_not_merged() -> None:
    """peft adapts it in one of its places."""
    model = make_any(small_config("llama"))
    first, second = model.model.layers[:2]
    second.self_attn.q_proj = first.self_attn.q_proj
    with pytest.raises(CannotTrain, match="shares its weights"):
        with_adapters(model, LORA.model_copy(update={"merge": True}), 0)


def test_named_modules_of_towers_are_not_adapted() -> None:
    model = make_any(small_config("gemma3"))
    adapters = LORA.model_copy(update={"target_modules": ("q_proj",)})
    names = [name for name, _ in with_adapters(model, adapters, 0).named_parameters() if "lora_" in name]
    assert names
    assert not any("vision" in name for name in names)
    only = adapters.model_copy(update={"target_modules": ("fc1",)})
    with pytest.raises(CannotTrain, match="not part of the language model"):
        with_adapters(make_any(small_config("gemma3")), only, 0)


@pytest.mark.parametrize(("earlier", "later"), [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0)])
def test_adapters_of_experts_are_continued_whatever_the_dropout(
    tmp_path: Path, earlier: float, later: float
) -> None:
    data = small_data()
    methods = [
        MethodSpec(name="lora", lora=LORA.model_copy(update={"dropout": each})) for each in (earlier, later)
    ]
    first = lay_any(tmp_path / "first", "mixtral", make_spec(data=data, max_steps=2, method=methods[0]))
    run_to_end(first)
    second = lay_any(tmp_path / "second", "mixtral", make_spec(data=data, max_steps=2, method=methods[1]))
    for _ in range(2):  # the adapters of the job that continued the first are continued in turn
        assignment = second.assignment()
        layer = ModelLayer(
            name="ft:x:accrue::1", job_id="ftjob-1", folder="model", lora=methods[0].lora,
            fingerprint=fingerprint_of_files(first.model),
        )  # fmt: skip
        model = assignment.spec.model.model_copy(update={"layers": (layer,)})
        spec = assignment.spec.model_copy(update={"model": model})
        second.write_assignment(
            assignment.model_copy(update={"spec": spec, "layer_paths": (str(first.model),)})
        )
        run_to_end(second)
        assert set(load_file(second.model / "adapter_model.safetensors")) == set(
            load_file(first.model / "adapter_model.safetensors")
        )
        first, methods[0] = second, methods[1]
        second = lay_any(tmp_path / "third", "mixtral", make_spec(data=data, max_steps=2, method=methods[1]))


@pytest.mark.parametrize("packing", [False, True])
def test_short_samples_have_the_positions_of_short_texts(tmp_path: Path, packing: bool) -> None:
    """Whatever else is in their micro-batch."""
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdef gh"), int(draw.integers(3, 50)))) for _ in range(24)]
    found = []
    for count in (1, 2, 8, 24):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        make_any(long_rope()).save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        spec = make_spec(
            data=small_data(packing=packing), max_steps=2, effective_batch_size=12, certificate=True,
            optimizer=make_optimizer("sgd", 0.05), schedule=make_schedule("constant"),
        )  # fmt: skip
        run = lay_any(folder / "run", "phi3", spec, rule=FixedCount(micro_batches=count))
        run_to_end(run)
        found.append(weights(run))
    for other in found[:-1]:
        for name, weight in found[-1].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    cut=st.one_of(
        st.builds(TokenBudget, tokens=st.integers(1, 200)),
        st.builds(FixedCount, micro_batches=st.integers(1, 12)),
        st.builds(FixedSize, samples=st.integers(1, 12)),
    ),
    packed=st.booleans(),
    by_length=st.booleans(),
)
def test_long_samples_are_cut_apart(
    lengths: list[int], cut: MicroBatchRule, packed: bool, by_length: bool
) -> None:
    groups = cut_window(lengths, cut, by_length=by_length, packed=packed, separate_above=16)
    assert sorted(each for group in groups for each in group) == list(range(len(lengths)))
    for group in groups:
        assert len({lengths[each] > 16 for each in group}) == 1
    if isinstance(cut, FixedCount) and cut.micro_batches > 1:
        assert len(groups) == min(cut.micro_batches, len(lengths))


@pytest.mark.parametrize("family", ["opt", "gpt_oss", "qwen3_next", "bloom", "hy_v4", "falcon_h1"])
def test_models_that_mix_packed_samples_are_padded(tmp_path: Path, family: str) -> None:
    """In bf16 too, in which their loss hardly shows it."""
    spec = make_spec(data=small_data(packing=True), max_steps=2)
    run = lay_any(tmp_path / "run", family, spec, precision="bf16")
    run_to_end(run)
    assert any("are padded instead" in event["message"] for event in events_of_kind(run, "changed"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_models_that_keep_packed_samples_apart_stay_packed(tmp_path: Path, family: str) -> None:
    spec = make_spec(data=small_data(packing=True), max_steps=2)
    run = lay_any(tmp_path / "run", family, spec, precision="bf16")
    run_to_end(run)
    assert not any("padded" in event["message"] for event in events_of_kind(run, "changed"))


def test_adapters_that_peft_would_not_load_again_are_not_trained() -> None:
    with pytest.warns(UserWarning, match="could not load them again"):
        adapted = with_adapters(make_any(small_config("laguna")), LORA, 0)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert any(".experts." in name for name in trained)
    assert not any("shared_experts" in name for name in trained)


@pytest.mark.parametrize("given", ["all-linear", ["all-linear"], None])
def test_pefts_name_for_every_linear_layer_is_known(given: Any) -> None:
    assert LoraConfig.model_validate({"target_modules": given}).target_modules is None


def test_a_module_that_is_not_linear_is_named() -> None:
    adapters = LORA.model_copy(update={"target_modules": ("mlp",)})
    with pytest.raises(CannotTrain, match="names LlamaMLP, which is not a linear layer"):
        with_adapters(make_any(small_config("llama")), adapters, 0)


def test_the_weights_of_a_model_in_several_files_are_checked(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_any(small_config("llama")).save_pretrained(model, max_shard_size="20KB")
    make_tokenizer().save_pretrained(model)
    assert len(list(model.glob("*.safetensors"))) > 2
    run_to_end(lay_any(tmp_path / "run", "llama", make_spec(data=small_data(), max_steps=2)))
    last = sorted(model.glob("*.safetensors"))[-1]
    kept = load_file(last)
    name = next(name for name in kept if name.endswith("weight"))
    save_file({**kept, name: kept[name].to(torch.float8_e4m3fn)}, last, {"format": "pt"})
    with pytest.raises(CannotTrain, match="quantized"):
        run_to_end(lay_any(tmp_path / "other", "llama", make_spec(data=small_data(), max_steps=2)))


@pytest.mark.parametrize("samples", [2, 3])
def test_packing_is_checked_with_few_samples(tmp_path: Path, samples: int) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "some text"}\n' * samples)
    spec = make_spec(data=small_data(packing=True), max_steps=2, certificate=False)
    run = lay_any(tmp_path / "run", "opt", spec)
    run_to_end(run)
    assert any("are padded instead" in event["message"] for event in events_of_kind(run, "changed"))


def test_packing_is_checked_with_long_samples(tmp_path: Path) -> None:
    """Beyond some length, deepseek_v4 compresses what is before, of other samples too."""
    lines = [json.dumps({"text": "abcdefg hi" * (19 + number % 4)}) for number in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(f"{line}\n" for line in lines))
    data = small_data(packing=True).model_copy(update={"max_length": 256})
    run = lay_any(tmp_path / "run", "deepseek_v4", make_spec(data=data, max_steps=2, certificate=False))
    run_to_end(run)
    assert any("are padded instead" in event["message"] for event in events_of_kind(run, "changed"))


def kinds_of(tmp_path: Path, family: str, change: Any) -> None:
    """Trains a model after a change of its weights."""
    model = tmp_path / "model"
    make_any(small_config(family)).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    kept = load_file(model / "model.safetensors")
    change(kept)
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    run_to_end(lay_any(tmp_path / "run", family, make_spec(data=small_data(), max_steps=2)))


def of_experts(kept: dict[str, torch.Tensor]) -> None:
    for name in [name for name in kept if name.endswith("experts.gate_up_proj")]:
        kept[name] = kept[name].to(torch.float8_e4m3fn)


def with_scales(kept: dict[str, torch.Tensor]) -> None:
    for name in [name for name in kept if name.endswith("experts.gate_up_proj")]:
        kept[f"{name}_scale"] = torch.ones(1)


def of_unused_layers(kept: dict[str, torch.Tensor]) -> None:
    kept["mtp.layers.0.up_proj.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    kept["mtp.layers.0.up_proj.weight_scale_inv"] = torch.ones(1)


@pytest.mark.parametrize("change", [of_experts, with_scales])
def test_quantized_experts_are_refused(tmp_path: Path, change: Any) -> None:
    with pytest.raises(CannotTrain, match="experts"):
        kinds_of(tmp_path, "gpt_oss", change)


def test_quantized_layers_that_are_not_used_do_not_matter(tmp_path: Path) -> None:
    kinds_of(tmp_path, "llama", of_unused_layers)


def test_an_index_beside_the_whole_weights_is_not_used(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text('{"weight_map": {"a": "other.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_compiled_shapes_keep_short_samples_short() -> None:
    lengths = np.arange(1, 65)
    rounded = Buckets(1024, 64, separate_above=18).length(lengths)
    assert (rounded >= lengths).all()
    assert (rounded[lengths <= 18] <= 18).all()
    assert Buckets(1024, 64).length(np.array([17])) > 18


@pytest.mark.parametrize("letters", ["ACGT", "\u0430\u0431\u0432"])
def test_tokens_before_a_text_are_found_with_any_vocabulary(letters: str) -> None:
    from tokenizers import Tokenizer, models, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    special = ["[CLS]", "[SEP]", "<eos>"]
    inner.train_from_iterator([letters * 3], trainers.BpeTrainer(special_tokens=special, vocab_size=20))
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", cls_token="[CLS]")
    tokens, _ = tokens_of(tokenizer, {"prompt": letters, "completion": letters})
    assert tokens[:1] == [0]
