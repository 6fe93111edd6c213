"""What a preview shows is what the trainer reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.contract.architecture import BUILT_IN_MODEL
from app.contract.model_reference import ModelReference
from app.contract.preview import DatasetPreview, PreviewSpec
from tests.harness.data import spec, with_digest_of
from tests.harness.specs import make_spec
from workers.training.data.preparation import Samples, prepare
from workers.training.data.preview import MAX_EXAMPLES, preview
from workers.training.exceptions import CannotTrain
from workers.training.models.tiny_gpt2 import make_tokenizer

CHAT = {
    "messages": [
        {"role": "user", "content": "Wie heißt du?"},
        {"role": "assistant", "content": "Größe 🙂 1"},
        {"role": "user", "content": "Und?"},
        {"role": "assistant", "content": "Nein.", "weight": 0},
    ]
}


def model() -> ModelReference:
    found = make_spec().model
    assert found.name == BUILT_IN_MODEL
    return found


def seen(
    tmp_path: Path, lines: list[dict[str, Any]], form: str, shown: int = 3, **changes: Any
) -> DatasetPreview:
    source = tmp_path / "data.jsonl"
    source.write_text("\n\n".join(json.dumps(line) for line in lines))
    data = with_digest_of(source, spec(form, examples=len(lines), **changes))
    return preview(PreviewSpec(model=model(), data=data, shown=shown), source, make_tokenizer())


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("text", {"text": "Äpfel und 🍐"}),
        ("prompt_completion", {"prompt": "eins", "completion": " zwei ü"}),
        ("messages", CHAT),
    ],
)
@pytest.mark.parametrize("overlength", ["truncate", "split"])
def test_preview_samples_equal_the_trainer_s(
    tmp_path: Path, form: str, line: dict[str, Any], overlength: str
) -> None:
    tokenizer = make_tokenizer()
    looked = seen(tmp_path, [line] * 2, form, shown=20, max_length=40, overlength=overlength)
    source = tmp_path / "data.jsonl"
    prepare(
        with_digest_of(source, spec(form, examples=2, max_length=40, overlength=overlength)),
        source,
        tokenizer,
        tmp_path / "p",
    )
    samples = Samples(tmp_path / "p")
    assert len(looked.samples) == len(samples)
    for number, sample in enumerate(looked.samples):
        tokens, counts = samples.read(number)
        assert (list(sample.token_ids), list(sample.counts)) == (tokens.tolist(), counts.tolist())
        assert sample.target_tokens == samples.targets[number]
        assert len(sample.tokens) == len(tokens)
        whole = tokenizer.decode(tokens)
        assert whole.rstrip("\N{REPLACEMENT CHARACTER}") == "".join(sample.tokens)
    assert {sample.line for sample in looked.samples} == {1, 3}


def test_a_large_file_is_sampled_evenly(tmp_path: Path) -> None:
    lines = [{"text": "x" * (10 if number < 2000 else 110)} for number in range(3 * MAX_EXAMPLES)]
    looked = seen(tmp_path, lines, "text", max_length=64)
    lengths = looked.lengths
    assert lengths.examples == MAX_EXAMPLES
    assert (lengths.shortest, lengths.longest, lengths.median) == (11, 111, 11.0)
    assert lengths.over_max_length == pytest.approx(MAX_EXAMPLES / 3, abs=1)
    assert sum(each.examples for each in lengths.histogram) == MAX_EXAMPLES
    assert all(each.below - each.at_least == 10 for each in lengths.histogram)
    assert (lengths.histogram[0].at_least, lengths.histogram[-1].below) == (10, 120)
    assert lengths.histogram[0].examples == MAX_EXAMPLES - lengths.over_max_length
    assert [sample.line for sample in looked.samples] == [1, 3, 5]


def test_overlong_examples_are_counted_but_not_shown(tmp_path: Path) -> None:
    lines = [{"text": "x" * 100}, {"text": "short"}]
    looked = seen(tmp_path, lines, "text", max_length=20, overlength="error")
    assert [sample.line for sample in looked.samples] == [3]
    assert (looked.lengths.over_max_length, looked.lengths.without_targets) == (1, 1)


def test_samples_filled_by_their_prompt_are_counted(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * 50, "completion": "c"}, {"prompt": "p", "completion": "c" * 10}]
    lengths = seen(tmp_path, lines, "prompt_completion", max_length=20).lengths
    assert lengths.without_targets == 1
    assert lengths.target_share == pytest.approx(11 / (20 + 12))


def test_a_preview_fails_with_the_trainer_s_error(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps(CHAT))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    order = PreviewSpec(model=model(), data=with_digest_of(source, spec("messages")), shown=1)
    with pytest.raises(CannotTrain, match="no chat template"):
        preview(order, source, tokenizer)


def test_each_pair_is_shown_with_both_answers(tmp_path: Path) -> None:
    lines = [{"prompt": "Say", "chosen": f" yes {each}", "rejected": f" no {each}"} for each in range(3)]
    looked = seen(tmp_path, lines, "preference", shown=2)
    assert [(each.line, each.answer) for each in looked.samples] == [
        (1, "chosen"), (1, "rejected"), (3, "chosen"), (3, "rejected"),
    ]  # fmt: skip
    assert ["yes" in "".join(each.tokens) for each in looked.samples] == [True, False, True, False]


def test_a_labelled_text_is_shown_as_a_classifier_reads_it(tmp_path: Path) -> None:
    lines = [{"text": "ab", "label": 0}, {"text": "abcd", "label": 1}, {"text": "a", "label": 1}]
    looked = seen(tmp_path, lines, "classification", classes=("0", "1"))
    source = tmp_path / "data.jsonl"
    data = with_digest_of(source, spec("classification", examples=3, classes=("0", "1")))
    prepare(data, source, make_tokenizer(), tmp_path / "p")
    samples = Samples(tmp_path / "p")
    for number, sample in enumerate(looked.samples):
        assert list(sample.token_ids) == samples.read(number)[0].tolist(), "without an end-of-sequence token"
        assert sample.counts == (*(False,) * (len(sample.tokens) - 1), True), "the class is predicted there"
        assert sample.target_tokens == samples.targets[number] == 1
    assert looked.lengths.longest == 4
    assert looked.lengths.without_targets == 0


def test_pairs_with_equal_answers_are_counted(tmp_path: Path) -> None:
    opening = "the same long opening of both answers "
    lines = [
        {"prompt": str(each), "chosen": opening + "yes", "rejected": opening + "no"} for each in range(3)
    ]
    assert seen(tmp_path, lines, "preference", max_length=30).lengths.equal_answers == 3
    assert seen(tmp_path, lines, "preference", max_length=64).lengths.equal_answers == 0


def test_samples_of_weight_zero_count_nothing(tmp_path: Path) -> None:
    looked = seen(tmp_path, [{"text": "abc", "weight": 0}, {"text": "abc"}], "text")
    assert looked.lengths.without_targets == 1
    assert [sample.target_tokens for sample in looked.samples] == [0, 3]


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


_WITH_CALLS, _WITHOUT_CALLS = (
    "{{ tools or '' }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    + calls
    + "<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    for calls in ("{{ (m.tool_calls or '') | string }}", "")
)


@pytest.mark.parametrize(
    ("template", "renders"), [(None, False), (_WITH_CALLS, True), (_WITHOUT_CALLS, False)], ids=str
)
def test_tool_calls_that_the_template_leaves_out_are_counted(
    tmp_path: Path, template: str | None, renders: bool
) -> None:
    """The function's name elsewhere in the chat, as in the list of tools, is not its call."""
    chat = {
        "messages": [
            {"role": "user", "content": "Rain? get_weather!"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "get_weather: dry"},
            {"role": "assistant", "content": "No."},
        ],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}],
    }
    tokenizer = make_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in (chat, CHAT)))
    data = with_digest_of(source, spec("messages", examples=2, max_length=400))
    looked = preview(PreviewSpec(model=model(), data=data, shown=2), source, tokenizer)
    assert looked.lengths.without_tool_calls == (0 if renders else 1)
    prepared = prepare(data, source, tokenizer, tmp_path / "p")
    assert prepared.without_tool_calls == (0 if renders else 1)
    assert any("tool calls" in note for note in prepared.notes(200)) is not renders


def test_keys_that_training_ignores_are_named(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "completion": "c", "label": 1, "id": 7}, {"prompt": "p", "completion": "c"}]
    assert seen(tmp_path, lines, "prompt_completion").lengths.unused_keys == ("id", "label")
