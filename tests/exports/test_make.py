"""Exports made in this process: what is in them, and that what differs from the trained model is found."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.contract.export import ExportFormat, ExportType
from app.contract.model_reference import LoraSpec
from app.contract.objective import OtherObjectiveName
from app.contract.spec import MethodSpec, ValidationSpec
from tests.harness.exports import task_of
from tests.harness.preferences import preference_run
from tests.harness.runs import create_run, small_data, write_chats
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end
from workers.exports import make as exports
from workers.exports import verify
from workers.exports.refusal import NotExported
from workers.run_directory import RunDirectory
from workers.training.models.score_head import score_layer_of

LORA = LoraSpec(r=8, alpha=16, dropout=0.0, target_modules=None, merge=False)


def trained(folder: Path, lora: LoraSpec | None) -> RunDirectory:
    """A run that has trained a model on chats, a fifth of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "data.jsonl")
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    method = MethodSpec(name="full" if lora is None else "lora", lora=lora)
    spec = make_spec(
        data=small_data(format="messages", examples=40, validation=share), method=method, max_steps=30
    )
    run = create_run(folder / "run", spec)
    run_to_end(run)
    return run


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.thorough), "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(tmp_path_factory.mktemp("run"), LORA if request.param == "lora" else None)


@pytest.mark.parametrize(
    "type_", ["bf16", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("fp32", None))]
)
def test_a_whole_model_predicts_what_the_trained_one_does(
    run: RunDirectory, tmp_path: Path, type_: ExportType | None
) -> None:
    result = exports.make(task_of(run, tmp_path, "merged", type_))
    assert result.verification is not None
    assert result.verification.agreement + result.verification.near_ties >= 0.999
    assert result.verification.held_out
    assert result.verification.samples == 8
    folder = tmp_path / "export" / "files"
    assert {each.name for each in result.files} >= {"model.safetensors", "tokenizer.json", "Modelfile"}
    assert not (folder / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == (torch.bfloat16 if type_ == "bf16" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(run.model).chat_template


@pytest.mark.thorough
def test_adapters_are_exported_alone(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", LORA)
    result = exports.make(task_of(run, tmp_path / "own", "adapter"))
    assert result.type is None
    assert result.verification is not None
    assert result.verification.agreement == 1.0
    names = {each.name for each in result.files}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("classification", "merged"),
        pytest.param("classification", "adapter", marks=pytest.mark.thorough),
        *(pytest.param("reward", form, marks=pytest.mark.thorough) for form in ("adapter", "merged")),
    ],
)
def test_a_model_that_scores_texts_is_compared_by_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: OtherObjectiveName, form: ExportFormat
) -> None:
    """And an export with another head is refused."""
    method = MethodSpec(name="lora", lora=LORA) if form == "adapter" else None
    run = preference_run(tmp_path / "run", name, **({"method": method} if method else {}), max_steps=40)
    run_to_end(run)
    result = exports.make(task_of(run, tmp_path / "own", form))
    assert result.verification is not None
    assert result.verification.agreement + result.verification.near_ties == 1.0
    assert (result.verification.samples, result.verification.tokens) == (8, 8), "one prediction for each"
    assert "Modelfile" not in {each.name for each in result.files}
    honest = verify.predictions

    def reversed_scores(model: Any, samples: Any) -> verify.Predictions:
        layer = score_layer_of(model)
        assert layer is not None
        with torch.no_grad():
            layer.weight.mul_(-1 if compared else 1)  # of the export, which comes second
        compared.append(model)
        return honest(model, samples)

    compared: list[Any] = []
    monkeypatch.setattr(verify, "predictions", reversed_scores)
    with pytest.raises(NotExported, match="does not agree"):
        exports.make(task_of(run, tmp_path / "spoiled", form))


def _spoil_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda each: weights[each].numel())
    weights[name] = weights[name] + 0.5 * torch.randn_like(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _forget_an_adapter(folder: Path) -> None:
    """As if the adapters had not been merged: the base model's weights."""
    from workers.training.models.tiny_gpt2 import make_model

    make_model().save_pretrained(folder)


def _change_template(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("Chat:\n" + template.read_text())


def _lose_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_spoil_weights, "does not agree with the trained model"),
        pytest.param(_forget_an_adapter, "does not agree with the trained model", marks=pytest.mark.thorough),
        pytest.param(_change_template, "gives other tokens", marks=pytest.mark.thorough),
        pytest.param(_lose_template, "no chat template", marks=pytest.mark.thorough),
    ],
)
def test_what_differs_is_found(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, why: str
) -> None:
    """The files are spoiled after they were written, and before they are compared."""
    honest = exports._loaded_plainly

    def spoiled(folder: Path) -> Any:
        spoil(folder)
        return honest(folder)

    monkeypatch.setattr(exports, "_loaded_plainly", spoiled)
    with pytest.raises(NotExported, match=why):
        exports.make(task_of(run, tmp_path, "merged"))


@pytest.mark.thorough
def test_a_spoiled_adapter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", LORA)
    honest = exports._loaded_with_peft

    def spoiled(order: Any, staged: Any, below: Any, folder: Path) -> Any:
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(
            {name: -weight if "lora_B" in name else weight for name, weight in weights.items()},
            folder / "adapter_model.safetensors",
        )
        return honest(order, staged, below, folder)

    monkeypatch.setattr(exports, "_loaded_with_peft", spoiled)
    with pytest.raises(NotExported, match="does not agree"):
        exports.make(task_of(run, tmp_path / "own", "adapter"))


@pytest.mark.thorough
def test_without_its_data_a_model_is_not_exported(run: RunDirectory, tmp_path: Path) -> None:
    task = task_of(run, tmp_path, "merged")
    with pytest.raises(NotExported, match="has been deleted"):
        exports.make(task.model_copy(update={"data": str(tmp_path / "nothing.jsonl")}))


@pytest.mark.thorough
def test_gguf_needs_a_converter(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(NotExported, match="ACCRUE_GGUF_CONVERTER"):
        exports.make(task_of(run, tmp_path, "gguf"))


@pytest.mark.thorough
def test_a_converter_that_fails_is_named_with_its_reason(run: RunDirectory, tmp_path: Path) -> None:
    converter = tmp_path / "convert.py"
    converter.write_text("import sys; print('this family is unknown', file=sys.stderr); sys.exit(1)")
    task = task_of(run, tmp_path / "own", "gguf").model_copy(update={"converter": str(converter)})
    with pytest.raises(NotExported, match="this family is unknown"):
        exports.make(task)


@pytest.mark.thorough
def test_without_held_out_samples_training_samples_are_used(tmp_path: Path) -> None:
    write_chats(tmp_path / "data.jsonl")
    spec = make_spec(data=small_data(format="messages", examples=40), max_steps=4)
    run = create_run(tmp_path / "run", spec)
    run_to_end(run)
    result = exports.make(task_of(run, tmp_path / "own", "merged"))
    assert result.verification is not None
    assert not result.verification.held_out
    assert hashlib.sha256((tmp_path / "data.jsonl").read_bytes()).hexdigest()


def test_prompts_longer_than_what_is_compared_are_an_error(run: RunDirectory, tmp_path: Path) -> None:
    """Nothing is verified by no predictions."""
    task = task_of(run, tmp_path, "merged")
    order = task.order.model_copy(update={"data": task.order.data.model_copy(update={"max_length": 8})})
    with pytest.raises(NotExported, match="nothing to compare"):
        exports.make(task.model_copy(update={"order": order}))


def test_near_ties_count_as_agreement() -> None:
    expected = verify.Predictions(
        torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2]]),
        torch.tensor([[-0.69, -0.70], [-0.1, -3.0], [-0.1, -3.0], [-0.1, -3.0]]),
    )
    found = verify.Predictions(torch.tensor([[2], [1], [2], [7]]), torch.zeros(4, 1))
    result = verify.compared(expected, found, [])
    assert result.agreement == 0.25
    assert result.near_ties == 0.25
    assert not result.is_valid
    assert verify.compared(expected, expected, []).is_valid
