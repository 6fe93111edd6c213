"""The head that scores whole texts: where scores are read, which heads are kept, and what is saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

from app.contract.export import ExportFormat
from app.contract.model_reference import LoraSpec
from app.contract.objective import OtherObjectiveName
from app.contract.spec import MethodSpec
from app.exports.routes import _commands
from tests.harness.exports import task_of
from tests.harness.preferences import (
    CLASSES,
    objective_spec,
    preference_data,
    preference_run,
    preference_samples,
    write_preferences,
)
from tests.harness.runs import create_run, events_of
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from tests.harness.training import raw_log, run_to_end
from workers.exports import make as exports
from workers.run_directory import RunDirectory
from workers.training.data.batch_loader import lay_out
from workers.training.micro_batches.batches import BatchLayout
from workers.training.models.auto_class import auto_class
from workers.training.models.score_head import ends

LORA = MethodSpec(name="lora", lora=LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False))
FULL = MethodSpec(name="full", lora=None)
LETTERS = "abcdefghijklmnop"


def make_tokenizer(folder: Path, pad: str | None = None) -> Any:
    """A tokenizer of letters that adds nothing, skips spaces, and has no token for padding unless `pad`."""
    vocabulary = {letter: number for number, letter in enumerate([*LETTERS, "</s>"])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    if pad is not None:
        made.add_special_tokens({"pad_token": pad})
    made.save_pretrained(folder)
    return made


def run_of(folder: Path, name: OtherObjectiveName, method: MethodSpec = FULL, **changes: Any) -> RunDirectory:
    """A run on a small Llama in `folder / "model"`, which is made if it is not there."""
    model = folder / "model"
    if not model.exists():
        make_tokenizer(model)
        make_llama(model)
    if not (folder / "data.jsonl").exists():
        write_preferences(folder / "data.jsonl", name, 32)
    rows = len((folder / "data.jsonl").read_text().splitlines())
    data = preference_data(name, rows)
    fields: dict[str, Any] = {"max_steps": 20, "certificate": True, "effective_batch_size": 8, **changes}
    schedule = make_schedule("linear", warmup_steps=0)
    spec = make_spec(data=data, objective=objective_spec(name), method=method, schedule=schedule, **fields)
    run = create_run(folder / "run", spec)
    run.write_assignment(run.assignment().model_copy(update={"model_path": str(model)}))
    return run


def make_llama(folder: Path, *, names: tuple[str, ...] = (), vocabulary: int = len(LETTERS) + 1) -> Any:
    """A language model, or one with these scores."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=64, initializer_range=0.2,
        bos_token_id=None, eos_token_id=len(LETTERS),
    )  # fmt: skip
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    torch.manual_seed(0)
    model = auto_class(config, scores=bool(names)).from_config(config)
    model.save_pretrained(folder)
    return model


def texts_of(run: RunDirectory) -> list[str]:
    lines = Path(run.assignment().data_file).read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("pad", [None, "[PAD]"])
def test_a_model_whose_tokenizer_cannot_pad_is_saved_so_that_it_can(tmp_path: Path, pad: str | None) -> None:
    """Without a token for padding, or with one that has no embedding."""
    make_tokenizer(tmp_path / "model", pad)
    make_llama(tmp_path / "model")
    run = run_of(tmp_path, "classification")
    run_to_end(run)
    ask = pipeline("text-classification", model=str(run.model))
    texts = texts_of(run)
    alone, together = ask(texts), ask(texts, batch_size=8)
    for one, other in zip(alone, together, strict=True):
        assert one["label"] == other["label"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_an_export_gives_the_scores_of_training_as_its_command_loads_it(
    tmp_path: Path, form: ExportFormat
) -> None:
    run = run_of(tmp_path, "reward", LORA if form == "adapter" else FULL)
    run_to_end(run)
    task = task_of(run, tmp_path / "own", form)
    assert exports.make(task).verification is not None
    folder = tmp_path / "own" / "export" / "files"
    command = _commands(task.order).transformers
    base = str(tmp_path / "model")
    scope: dict[str, Any] = {}
    known = command.replace("BASE", base).replace("DIR", str(folder)).partition("; score(")[0]
    exec(known, scope)
    model = scope["model"] if form == "adapter" else scope["score"].model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = AutoModelForSequenceClassification.from_pretrained(
        base if form == "adapter" else run.model, num_labels=1
    )
    expected.config.pad_token_id = len(LETTERS)
    if form == "adapter":
        from peft import PeftModel

        expected = PeftModel.from_pretrained(expected, run.model)
    texts = [f"{word}</s>" for word in ("abc", "dd", "feeba", "kk")]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        found, wanted = (each.eval()(**batch).logits for each in (model, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_text_without_a_token_does_not_count(tmp_path: Path) -> None:
    rows = [
        {"text": "abc", "label": "long"},
        {"text": "dd", "label": "short"},
        {"text": "e", "label": "medium"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows * 6)))
    whole = raw_log_of(run_of(tmp_path, "classification", epochs=1, max_steps=None, effective_batch_size=18))
    other = tmp_path / "other"
    other.mkdir()
    empty = {"text": " ", "label": "long"}
    (other / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*(rows * 6), empty, empty)))
    found = run_of(other, "classification", epochs=1, max_steps=None, effective_batch_size=20)
    assert raw_log_of(found)[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    prepared = [event for event in events_of(found) if "without a token" in event["message"]]
    assert len(prepared) == 1


def raw_log_of(run: RunDirectory) -> list[dict[str, Any]]:
    run_to_end(run)
    return raw_log(run)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (CLASSES, True),
        (CLASSES[::-1], True),
        (("LABEL_0", "LABEL_1", "LABEL_2"), False),
        (("good", "bad"), False),
    ],
)
def test_a_classifier_keeps_its_head_if_it_has_the_same_classes(
    tmp_path: Path, names: tuple[str, ...], kept: bool
) -> None:
    make_tokenizer(tmp_path / "model")
    before = make_llama(tmp_path / "model", names=names)
    run = run_of(tmp_path, "classification", max_steps=1, optimizer=make_optimizer("adamw", 1e-5))
    run_to_end(run)
    after = AutoModelForSequenceClassification.from_pretrained(run.model)
    assert after.config.id2label == dict(enumerate(CLASSES))
    notes = [event["message"] for event in events_of(run) if "is new" in event["message"]]
    assert len(notes) == (0 if kept else 1)
    if kept:
        order = [names.index(name) for name in CLASSES]
        torch.testing.assert_close(after.score.weight, before.score.weight[order], rtol=0, atol=1e-2)
    else:
        assert f"({', '.join(names)})" in notes[0]


def test_a_reward_model_of_one_s_own_keeps_its_head(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    before = make_llama(tmp_path / "model", names=("LABEL_0",))
    run = run_of(tmp_path, "reward", max_steps=1, optimizer=make_optimizer("adamw", 1e-5))
    run_to_end(run)
    after = AutoModelForSequenceClassification.from_pretrained(run.model)
    torch.testing.assert_close(after.score.weight, before.score.weight, rtol=0, atol=1e-2)


def test_a_score_is_read_at_the_last_token_that_is_not_padding() -> None:
    rows = [np.array(each, np.int32) for each in ([5, 6, 0], [7], [0, 0], [3, 0, 4, 0, 0])]
    assert ends(rows, pad_id=0).tolist() == [1, 0, 0, 2]
    assert ends(rows, pad_id=9).tolist() == [2, 0, 1, 4]


@pytest.mark.parametrize("packed", [False, True])
def test_targets_are_laid_at_the_ends_of_their_texts(tmp_path: Path, packed: bool) -> None:
    samples = preference_samples(tmp_path, objective_spec("classification"), weighted=True)
    batch = lay_out(samples, [3, 0, 7], BatchLayout(pad_id=0, packed=packed))
    last = batch.input_ids.flatten()[batch.target_positions].tolist()
    assert last == [int(samples.read(sample)[0][-1]) for sample in (3, 0, 7)]
    assert samples.classes is not None
    assert batch.targets.tolist() == samples.classes[[3, 0, 7]].tolist()
    assert batch.weights is not None
    assert batch.weights.tolist() == samples.weights[[3, 0, 7]].tolist()


def test_only_the_head_in_target_modules_is_explained(tmp_path: Path) -> None:
    from workers.training.exceptions import CannotTrain

    lora = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=("score",), merge=False)
    run = preference_run(tmp_path, "reward", method=MethodSpec(name="lora", lora=lora))
    with pytest.raises(CannotTrain, match="trained anyway"):
        run_to_end(run)
