"""Regression tests for the twenty-fourth attack."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file
from tokenizers import processors
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from app.contract.model_reference import LoraSpec
from app.contract.plan import FixedCount, TokenBudget
from app.contract.spec import MethodSpec, Spec, ValidationSpec
from app.jobs import parent_jobs
from app.main import create_app
from app.maintenance import retention
from app.models.base_models import local_names
from app.security.audit import MAX_REFUSED_PER_MINUTE, AuditLog, AuditRecord
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.any_family import lay_any, long_rope, make_any, small_config
from tests.harness.requests import PATH, submit
from tests.harness.runs import small_data, until
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from tests.harness.submissions import started_from, succeeded
from tests.harness.tokenizers import made, tokens_of
from tests.harness.training import events_of_kind, run_to_end
from workers.run_directory import RunDirectory
from workers.training.checks import packing_check
from workers.training.checks.certificate import _few
from workers.training.checks.packing_check import _with_other_tokens, fill_row
from workers.training.data.encoding import ExampleEncoder
from workers.training.exceptions import CannotTrain
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, collate
from workers.training.models import head as heads
from workers.training.models.precision import TOLERANCE
from workers.training.models.tiny_gpt2 import make_tokenizer
from workers.training.models.trainable import prepare_for_training
from workers.training.optimizer import make_optimizer as build_optimizer


def _write(folder: Path, texts: list[str]) -> None:
    (folder / "data.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))


def _reasons(run: RunDirectory) -> list[str]:
    return [event["message"] for event in events_of_kind(run, "changed")]


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recognised", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_samples_are_padded_if_only_a_long_row_mixes_them(
    tmp_path: Path, recognised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 scales attention by the position in the row, not by that in the sample."""
    if not recognised:
        monkeypatch.setattr(packing_check, "_scales_by_position_in_row", lambda *_: False)
    config = small_config("llama4_text")
    config.update({
        "attn_temperature_tuning": True, "floor_scale": 2048, "attn_scale": 0.1,
        "max_position_embeddings": 1024, "no_rope_layers": [1, 0],
    })  # fmt: skip
    config.layer_types = ["chunked_attention", "full_attention"]
    model = make_any(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    _write(tmp_path, ["".join(chr(97 + (7 * at + number) % 26) for at in range(600)) for number in range(8)])
    data = small_data(packing=True).model_copy(update={"max_length": 1024, "examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, aux_scope="none")
    run = lay_any(tmp_path / "run", "llama4_text", spec, rule=FixedCount(micro_batches=1))
    run_to_end(run)
    assert any("does not keep samples apart" in each for each in _reasons(run))


@pytest.mark.sqlite
def test_samples_are_padded_if_the_model_fails_on_the_two_longest_in_a_row(tmp_path: Path) -> None:
    """GPT-Neo's mask has the size of its positions: here of one sample, but not of two."""
    _write(tmp_path, ["abcdefg hi" * 30] * 8)
    data = small_data(packing=True).model_copy(update={"max_length": 512, "examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8)
    run = lay_any(tmp_path / "run", "gpt_neo", spec, rule=TokenBudget(tokens=1024))
    run_to_end(run)
    assert any("fails on such a row" in each for each in _reasons(run))


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
def test_packing_is_checked_with_other_tokens_even_if_a_sample_repeats_one(tmp_path: Path) -> None:
    """OPT mixes the samples of a row, which 16-bit weights hide unless the other tokens differ."""
    _write(tmp_path, ["a" * 200] * 2 + ["abcdefg hi" * 3] * 30)
    data = small_data(packing=True).model_copy(update={"max_length": 256, "examples": 32})
    lora = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
    method = MethodSpec(name="lora", lora=lora)
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, method=method)
    run = lay_any(tmp_path / "run", "opt", spec, precision="bf16", rule=TokenBudget(tokens=1024))
    run_to_end(run)
    assert any("does not keep samples apart" in each for each in _reasons(run))


def test_a_row_is_filled_with_the_longest_samples_that_there_is_room_for() -> None:
    lengths = np.array([90, 60, 50, 30, 30, 9, 2])
    assert fill_row(lengths, 160, 10) == [0, 1, 5]
    assert fill_row(lengths, 160, 2) == [0, 1]
    assert fill_row(lengths, 80, 10) == [1, 5, 6]
    assert fill_row(lengths, 1, 10) == []
    assert fill_row(lengths, 10**6, 10) == list(range(7))


@pytest.mark.parametrize("tokens", [["a"] * 5, ["a", "b", "a"], ["b", "a"]])
def test_every_token_is_replaced_by_another_one(tokens: list[str]) -> None:
    sample = np.array([ord(each) for each in tokens], np.int32)
    (other,) = _with_other_tokens([sample])
    assert (other != sample).all()
    assert other.dtype == sample.dtype


@pytest.mark.parametrize("kind", ["legacy", "first", "always"])
def test_a_text_that_has_its_first_and_last_tokens_gets_no_others(kind: str) -> None:
    tokenizer = made(kind)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    plain = tokens_of(tokenizer, {"text": "hello world"})
    assert plain[0][0] == tokenizer.bos_token_id
    assert plain[0][-1] == tokenizer.eos_token_id
    assert tokens_of(tokenizer, {"text": "hello world</s>"}) == plain
    whole = tokens_of(tokenizer, {"text": "<s>hello world</s>"})
    assert [whole[0].count(token) for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)] == [1, 1]
    prompted = tokens_of(tokenizer, {"prompt": "hello", "completion": " world"})
    assert tokens_of(tokenizer, {"prompt": "hello", "completion": " world</s>"}) == prompted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "tower"), [("git", "image_encoder"), ("phi4_multimodal", "extend")])
def test_towers_within_a_language_model_stay_as_they_are(family: str, tower: str) -> None:
    model = make_any(small_config(family))
    lora = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules=None, merge=False)
    options: Any = {"seed": 0, "gradient_checkpointing": False, "freeze": (), "precision": "fp32"}
    prepare_for_training(model, lora=None, **options)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen
    assert all(tower in name for name in frozen)
    adapted = prepare_for_training(make_any(small_config(family)), lora=lora, **options)
    assert not any(tower in name for name, weight in adapted.named_parameters() if weight.requires_grad)
    named = lora.model_copy(update={"target_modules": ("q_proj", "query", "qkv_proj")})
    adapted = prepare_for_training(make_any(small_config(family)), lora=named, **options)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained
    assert not any(tower in name for name in trained)


@pytest.mark.sqlite
def test_fp64_decides_without_mixing_short_and_long_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE computes them in another way."""
    monkeypatch.setitem(TOLERANCE, "fp32", -1.0)
    _write(tmp_path, ["abcdefg hi" * length for length in (1, 1, 2, 3, 4, 4, 5, 5)])
    make_any(long_rope()).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    data = small_data().model_copy(update={"examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8, certificate=True)
    run = lay_any(tmp_path / "run", "phi3", spec, rule=FixedCount(micro_batches=2))
    run_to_end(run)
    [certificate] = events_of_kind(run, "certificate")
    assert certificate["data"]["error_in_fp64"] <= 1e-6


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("precision", "amount"), [("fp32", 0.1), ("bf16", 0.002)])
def test_a_mixture_of_experts_that_mixes_samples_is_rejected(
    tmp_path: Path, precision: str, amount: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its choices of experts are not counted, so they cannot be the reason for the difference; and 16 bits
    would hide the smaller amount."""
    plain = MixtralSparseMoeBlock.forward

    def mixing(self: Any, hidden_states: Tensor) -> Tensor:
        found: Tensor = plain(self, hidden_states)
        return found + amount * hidden_states.mean(0, keepdim=True)

    monkeypatch.setattr(MixtralSparseMoeBlock, "forward", mixing)
    spec = make_spec(
        data=small_data(), max_steps=2, effective_batch_size=8, certificate=True, aux_scope="none"
    )
    run = lay_any(tmp_path / "run", "mixtral", spec, rule=FixedCount(micro_batches=2), precision=precision)
    with pytest.raises(CannotTrain, match="computes a sample differently beside other samples"):
        run_to_end(run)


def test_a_change_of_a_configuration_with_thousands_of_names_is_rejected_at_once(client: TestClient) -> None:
    root = "/gradient-accumulation/config"
    config = client.post(root, json={"accumulation_steps": 4}).json()["config_id"]
    answer = client.patch(f"{root}/{config}", json={f"x{number}": 0 for number in range(20_000)})
    assert answer.status_code == 422
    assert "20000 fields" in answer.text
    twice = client.patch(f"{root}/{config}", json={"micro_batch_size": 2, "batch_size": 4})
    assert "given twice" in twice.text


def _runs_with(tmp_path: Path, family: str, spec: Spec, model: Any, **plan: Any) -> RunDirectory:
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return lay_any(tmp_path / "run", family, spec, **plan)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("recurrent_gemma", "logits_soft_cap", 30.0),
        ("falcon_h1", "lm_head_multiplier", 1.05),
        ("llama", "", 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [True, False])
def test_the_head_is_probed_where_small_logits_hide_what_happens_to_them(
    family: str, field: str, value: float, dtype: torch.dtype, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        for names in ("_SCALES", "_CAPS"):
            monkeypatch.setattr(heads, names, ())
    config = small_config(family)
    if field:
        setattr(config, field, value)
    model = make_any(config).to(dtype)
    loss = TokenLoss(model)
    row = (np.arange(2, 40, dtype=np.int32), np.ones(38, np.bool_))
    with torch.no_grad():
        error = float(loss(collate([row], BatchLayout(257)), probe_head=True).loss_sum)
    if known or not field:
        assert error <= (0.0 if dtype == torch.float32 else 1e-2)
    else:
        assert error > 1e-2


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weight", [1.0, 1e-6])
def test_small_weights_of_samples_do_not_hide_another_head(tmp_path: Path, weight: float) -> None:
    lines = [json.dumps({"text": "abcdefg hi" * 3, "weight": weight}) for _ in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(f"{line}\n" for line in lines))
    data = small_data().model_copy(update={"examples": 8})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8)
    config = small_config("bert")
    run = _runs_with(tmp_path, "bert", spec, make_any(config), rule=FixedCount(micro_batches=2))
    run_to_end(run)
    assert any("not simply those of its output head" in each for each in _reasons(run))


@pytest.mark.filterwarnings("ignore")
def test_layers_that_multiply_blocks_get_no_adapters() -> None:
    model = make_any(small_config("deepseek_v4"))
    lora = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules=None, merge=False)
    adapted = prepare_for_training(
        model, lora=lora, seed=0, gradient_checkpointing=False, freeze=(), precision="fp32"
    )
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained
    assert not any("o_a_proj" in name for name in trained)
    ids = torch.arange(2, 20).unsqueeze(0)
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.sqlite
@pytest.mark.filterwarnings("ignore")
def test_rwkv_is_saved_as_it_was_evaluated(tmp_path: Path) -> None:
    """transformers divides its weights in place when it is evaluated."""
    config = small_config("rwkv", num_hidden_layers=4)
    config.rescale_every = 2
    _write(tmp_path, ["abcdefg hi" * (1 + number % 4) for number in range(24)])
    data = small_data(
        validation=ValidationSpec(file_id=None, sha256=None, format=None, share=0.25)
    ).model_copy(update={"examples": 24})
    spec = make_spec(data=data, max_steps=2, effective_batch_size=8)
    run = _runs_with(tmp_path, "rwkv", spec, make_any(config), rule=FixedCount(micro_batches=2))
    outcome = run_to_end(run)
    saved = AutoModelForCausalLM.from_pretrained(run.model).eval()
    assert saved.config.rescale_every == 2
    assert not hasattr(saved.config, "accrue_rescale_every")
    held = load_file(run.model / "model.safetensors")
    newest = load_file(sorted(run.checkpoints.iterdir())[-1] / "model.safetensors")
    for name, weight in newest.items():
        assert torch.equal(held[name], weight)
    assert outcome.eval_loss is not None


def test_a_few_samples_of_all_lengths_are_compared_in_fp64() -> None:
    class Lengths:
        lengths = np.array([50, 3, 7, 900, 20, 4, 300])
        targets = np.array([49, 2, 6, 899, 0, 3, 299])
        objective = None

    window = np.arange(7)
    assert _few(window, Lengths(), 1000).tolist() == [1, 5, 0, 3]  # type: ignore[arg-type]
    assert _few(window, Lengths(), 10**9).tolist() == [1, 5, 2, 0]  # type: ignore[arg-type]
    assert _few(window[:2], Lengths(), 1000).tolist() == [1, 0]  # type: ignore[arg-type]


@pytest.mark.sqlite
def test_packing_is_checked_again_if_a_new_plan_has_longer_rows(tmp_path: Path) -> None:
    _write(tmp_path, ["abcdefg hi" * 12] * 16)
    data = small_data(packing=True).model_copy(update={"max_length": 256, "examples": 16})
    spec = make_spec(data=data, max_steps=1, effective_batch_size=16, schedule=make_schedule("constant"))
    found = []
    for step, tokens in enumerate((300, 900, 600), start=1):
        spec = spec.model_copy(update={"max_steps": step})
        run_to_end(lay_any(tmp_path / "run", "llama", spec, rule=TokenBudget(tokens=tokens)))
        newest = sorted((tmp_path / "run" / "checkpoints").glob("*-*"))[-1]
        found.append(json.loads((newest / "state.json").read_text())["state"]["fallbacks"]["packed_tokens"])
    assert found == [300, 900, 900]


def test_a_repeated_request_gets_its_answer_whatever_was_deleted_since(client: TestClient) -> None:
    files = {"file": ("data.jsonl", b'{"text": "a b c"}\n')}
    file_id = client.post("/v1/files", files=files, data={"purpose": "fine-tune"}).json()["id"]
    headers = {"Idempotency-Key": "once"}
    body = {"training_file": file_id, "model": "accrue/tiny-gpt2"}
    first = client.post("/v1/fine_tuning/jobs", json=body, headers=headers)
    assert first.status_code == 200
    client.post(f"/v1/fine_tuning/jobs/{first.json()['id']}/cancel")
    assert client.delete(f"{PATH}/{first.json()['id']}").status_code == 204
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
    again = client.post("/v1/fine_tuning/jobs", json=body, headers=headers)
    assert (again.status_code, again.json()) == (200, first.json())
    other = client.post("/v1/fine_tuning/jobs", json={**body, "seed": 1}, headers=headers)
    assert "different request" in other.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "adafactor"])
def test_a_step_changes_every_weight(name: Any, dtype: torch.dtype) -> None:
    """torch's fused SGD leaves most weights in 16 bits unchanged on a CPU."""
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.0, 4097).to(dtype).view(17, 241))
    before = weight.detach().clone()
    optimizer = build_optimizer(make_optimizer(name, 0.1), [weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert (weight != before).all()


def test_a_prompt_that_ends_by_itself_does_not_become_a_target() -> None:
    """If the completion becomes no tokens, the prompt's own end is not what is learned."""
    tokenizer = made("first")
    end = int(tokenizer.eos_token_id)
    with ExampleEncoder(tokenizer) as encoder:
        of_prompt = encoder._begun_and_ended([5, end], [False, False])
        of_completion = encoder._begun_and_ended([5, end], [False, True])
    assert of_prompt == ([5, end, end], [False, False, True])
    assert of_completion == ([5, end], [False, True])


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 429])
def test_refused_requests_of_a_key_do_not_fill_the_audit_log(database: Database, status: int) -> None:
    log = AuditLog(database, 1.0)
    for _ in range(3 * MAX_REFUSED_PER_MINUTE):
        log.note(AuditRecord(time.time(), "key-1", "DELETE", "/x", status, "127.0.0.1", "req_1"))
    assert log._waiting.qsize() <= 2 * MAX_REFUSED_PER_MINUTE  # of two minutes at most


def test_a_stream_of_an_ended_job_ends_whatever_its_reader_has_read(client: TestClient) -> None:
    job = submit(client)["training_id"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "ftevent-zzzz"}
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(client.get, f"{PATH}/{job}/events", headers=headers)
        until(lambda: bool(client.app.state.events._followers), 10)  # type: ignore[attr-defined]
        assert client.post(f"{PATH}/{job}/cancel").status_code == 200
        answer = reader.result(timeout=20)
    assert answer.status_code == 200


def test_an_embedded_service_does_not_log_local_variables(settings: Settings) -> None:
    """Among them are the keys of requests."""
    structlog.reset_defaults()
    create_app(settings)
    processors = structlog.get_config()["processors"]
    assert structlog.processors.format_exc_info in processors


def test_models_that_a_link_leads_to_elsewhere_are_not_listed(settings: Settings, tmp_path: Path) -> None:
    folder = settings.models_dir
    assert folder is not None
    for place in (folder / "own", tmp_path / "elsewhere"):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert "own" in local_names(settings)
    assert "linked" not in local_names(settings)


@pytest.mark.parametrize(("merged", "model_deleted", "is_kept"), [
    (False, False, True), (True, False, False), (False, True, False),
])  # fmt: skip
def test_the_base_of_a_kept_adapter_does_not_expire(
    database: Database, settings: Settings, merged: bool, model_deleted: bool, is_kept: bool
) -> None:
    base, _ = succeeded(database, settings)
    adapter = started_from(database, base)
    lora = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=merged)
    with database.writing() as session:
        old, new = session.get_one(Job, base), session.get_one(Job, adapter)
        old.finished_at = time.time() - 40 * 86400
        new.status, new.finished_at = "succeeded", time.time()
        new.spec = {**new.spec, "method": MethodSpec(name="lora", lora=lora).model_dump(mode="json")}
        new.result = {"files": ["adapter_model.safetensors"], parent_jobs.MODEL_DELETED: model_deleted}
    retention.delete_expired(database, settings, 30)
    with database.reading() as session:
        assert (session.get(Job, base) is not None) == is_kept
    with database.writing() as session:
        session.get_one(Job, adapter).finished_at = time.time() - 35 * 86400
    retention.delete_expired(database, settings, 30)
    retention.delete_expired(database, settings, 30)
    with database.reading() as session:
        assert session.get(Job, base) is None
