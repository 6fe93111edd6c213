"""Base models from strangers: their files cannot name files elsewhere, and missing weights fail the job."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import ModelReference
from app.contract.plan import FixedSize
from tests.harness.runs import create_run, events_of, small_data, start_trainer
from tests.harness.specs import make_spec
from workers.run_directory import RunDirectory
from workers.training.data.rendering import Conversation, NotRendered, Renderer
from workers.training.exceptions import CannotTrain
from workers.training.models.base_model import load_tokenizer, stage_base_model
from workers.training.models.model_files import stage
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

SECRET = "hf_secretsecretsecret"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of the built-in model's files, to be tampered with."""
    ensure_tiny_gpt2(tmp_path / "models" / "victim")
    return tmp_path / "models" / "victim"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def run_with(model: Path, folder: Path, **spec: Any) -> RunDirectory:
    """A run that trains from that folder."""
    run = create_run(folder, make_spec(data=small_data(), max_steps=1, **spec), rule=FixedSize(samples=8))
    assignment = run.assignment()
    reference = assignment.spec.model.model_copy(update={"source": "local", "name": "victim"})
    own = assignment.spec.model_copy(update={"model": reference})
    run.write_assignment(assignment.model_copy(update={"spec": own, "model_path": str(model)}))
    return run


def failure_of(run: RunDirectory) -> str:
    assert start_trainer(run).wait(120) == 1
    failure = run.failure()
    assert failure is not None
    assert failure.permanent
    return failure.message


def secret_beside(model: Path, folder: Path) -> Path:
    """Creates a secret file outside the model's folder, and removes the model's own vocabulary."""
    secret = folder / "secret.txt"
    secret.write_text(SECRET)
    (model / "tokenizer.json").unlink()
    return secret


@pytest.mark.parametrize(
    ("tokenizer_class", "field"),
    [
        ("BertTokenizer", "vocab"), ("BertTokenizer", "vocab_file"), ("GPT2Tokenizer", "vocab"),
        ("GPT2Tokenizer", "merges"), ("LlamaTokenizer", "vocab_file"), ("T5Tokenizer", "vocab"),
        ("PreTrainedTokenizerFast", "tokenizer_file"), ("BertTokenizer", "init_inputs"),
    ],
)  # fmt: skip
def test_tokenizer_fields_that_name_files_are_dropped(
    model: Path, tmp_path: Path, tokenizer_class: str, field: str
) -> None:
    secret = secret_beside(model, tmp_path)
    value = [str(secret)] if field == "init_inputs" else str(secret)
    change(model / "tokenizer_config.json", tokenizer_class=tokenizer_class, **{field: value})
    with pytest.raises(CannotTrain, match=r"tokenizer\.json"):
        load_tokenizer(stage(model, tmp_path / "staged"))
    assert SECRET not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "staged").iterdir() if path.suffix == ".json"
    )


@pytest.mark.parametrize(
    "tokenizer_class", ["BertTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "EsmTokenizer"]
)
@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"])
def test_no_file_outside_of_the_staged_folder_is_opened(
    model: Path, tmp_path: Path, tokenizer_class: str, file: str
) -> None:
    """Whichever of the model's files names the outside file, and whether or not the tokenizer then works."""
    secret = secret_beside(model, tmp_path)
    (model / "vocab.json").write_text(json.dumps({"a": 0, "[UNK]": 1, "[SEP]": 2}))
    (model / "merges.txt").write_text("#version: 0.2\n")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": tokenizer_class}))
    if not (model / file).exists():
        (model / file).write_text("{}")
    named = {name: str(secret) for name in ("vocab", "vocab_file", "merges", "merges_file", "tokenizer_file")}
    change(model / file, eos_token="[SEP]", **named)
    opened: list[str] = []
    told, listening = "", True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    try:
        tokenizer = load_tokenizer(stage(model, tmp_path / "staged"))
        tokenizer.save_pretrained(tmp_path / "saved")
    except Exception as error:  # whether it works depends on the class: what it may not do is look elsewhere
        told = str(error)
    listening = False
    assert SECRET not in told
    assert str(secret) not in opened
    for path in (tmp_path / "saved").glob("*"):
        assert SECRET not in path.read_text(errors="replace")


def test_dropping_file_fields_keeps_the_tokenizer_working(model: Path, tmp_path: Path) -> None:
    change(model / "tokenizer_config.json", vocab="/proc/self/environ", init_inputs=["/etc/passwd"])
    staged_folder = stage(model, tmp_path / "staged")
    kept = json.loads((staged_folder / "tokenizer_config.json").read_text())
    assert not {"vocab", "init_inputs"} & kept.keys()
    load_tokenizer(staged_folder).save_pretrained(tmp_path / "saved")
    assert "passwd" not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


def test_a_config_neither_names_files_nor_overrides_the_job(model: Path, tmp_path: Path) -> None:
    change(
        model / "config.json", _attn_implementation="eager", attn_implementation="eager",
        transformers_weights="../other.safetensors", _name_or_path="/etc",
        sub_config={"vocab_file": "/etc/passwd", "hidden_size": 3},
    )  # fmt: skip
    kept = json.loads((stage(model, tmp_path / "staged") / "config.json").read_text())
    assert not {"_attn_implementation", "attn_implementation", "transformers_weights"} & kept.keys()
    assert kept["sub_config"] == {"hidden_size": 3}


@pytest.mark.parametrize("where", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden"])
def test_an_index_names_files_of_its_own_folder(model: Path, tmp_path: Path, where: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    with pytest.raises(CannotTrain, match="weight_map"):
        stage(model, tmp_path / "staged")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    shutil.move(model / name, tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotTrain, match="leads out of its folder"):
        stage(model, tmp_path / "staged")


def test_a_snapshot_of_the_hub_s_cache_links_into_its_own_repository(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        shutil.move(path, repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert (stage(snapshot, tmp_path / "staged") / "model.safetensors").exists()


def test_missing_weights_fail_the_job_and_are_listed(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    gone = [name for name in weights if ".h.1." in name or name.startswith("h.1.")]
    assert gone
    save_file(
        {k: v for k, v in weights.items() if k not in gone}, model / "model.safetensors", {"format": "pt"}
    )
    message = failure_of(run_with(model, tmp_path / "run"))
    assert f"{len(gone)} weights are missing" in message
    assert "h.1." in message


@pytest.mark.thorough
def test_weights_of_another_name_or_shape_fail_the_job(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    renamed = {f"other.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed, model / "model.safetensors", {"format": "pt"})
    assert "missing" in failure_of(run_with(model, tmp_path / "renamed"))
    name = next(name for name in weights if name.endswith("wpe.weight"))
    save_file({**weights, name: torch.zeros(3, 128)}, model / "model.safetensors", {"format": "pt"})
    message = failure_of(run_with(model, tmp_path / "reshaped"))
    assert "wpe" in message


def test_a_model_that_changed_since_submission_or_the_first_attempt_is_not_trained(
    model: Path, tmp_path: Path
) -> None:
    run = run_with(model, tmp_path / "run")
    assignment = run.assignment()
    reference = ModelReference(**{**vars(assignment.spec.model), "fingerprint": fingerprint_of_files(model)})
    assignment = assignment.model_copy(
        update={"spec": assignment.spec.model_copy(update={"model": reference})}
    )
    stage_base_model(assignment, run)
    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CannotTrain, match="changed since the job was submitted"):
        stage_base_model(assignment, run)
    without = assignment.model_copy(
        update={
            "spec": assignment.spec.model_copy(
                update={"model": reference.model_copy(update={"fingerprint": None})}
            )
        }
    )
    with pytest.raises(CannotTrain, match="first attempt"):
        stage_base_model(without, run)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "template",
    [
        "{{ (7**(7**11)) % 10 }}",
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        "{{ 'x' * 3000000000 }}",
    ],
)
def test_an_endless_template_fails_the_job_without_hanging(
    model: Path, tmp_path: Path, template: str
) -> None:
    run = chat_run(model, tmp_path, template)
    assert "chat template" in failure_of(run)


@pytest.mark.thorough
def test_a_template_cannot_put_the_data_into_an_error(model: Path, tmp_path: Path) -> None:
    run = chat_run(model, tmp_path, "{{ raise_exception(messages[0].content) }}")
    assert "rejects this conversation" in failure_of(run)
    told = json.dumps(events_of(run)) + run.trainer_log.read_text() + (run.path / "failure.json").read_text()
    assert "canary" not in told


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", '"Roles must alternate"'),
        ("{{ raise_exception(messages[0].content) }}", "TemplateError"),
        ("{{ raise_exception('No ' + messages[0].content) }}", "TemplateError"),
        ("{{ messages[0].missing.field }}", "UndefinedError"),
    ],
)  # fmt: skip
def test_a_template_s_own_reason_is_shown_but_nothing_of_the_data(template: str, reason: str) -> None:
    chat = Conversation([{"role": "user", "content": "canary"}], [(1, False)], None)
    with Renderer(template, {}) as renderer, pytest.raises(NotRendered) as error:
        renderer.render([chat])
    assert f"rejects this conversation ({reason})" in str(error.value)
    assert "canary" not in str(error.value)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}", "{{ messages | no_filter }}"])
def test_an_invalid_template_is_named_as_the_cause(template: str) -> None:
    chat = Conversation([{"role": "user", "content": "hi"}], [(1, False)], None)
    with Renderer(template, {}) as renderer, pytest.raises(NotRendered, match="is no valid template"):
        renderer.render([chat])


def chat_run(model: Path, tmp_path: Path, template: str) -> RunDirectory:
    messages = [{"role": "user", "content": "canary"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (model / "chat_template.jinja").write_text(template)
    run = run_with(model, tmp_path / "run", effective_batch_size=1)
    assignment = run.assignment()
    data = assignment.spec.data.model_copy(update={"format": "messages", "examples": 1})
    run.write_assignment(
        assignment.model_copy(update={"spec": assignment.spec.model_copy(update={"data": data})})
    )
    return run
