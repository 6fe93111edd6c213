"""A job's optional features: each trains, ends well, and resumes bit for bit where that is guaranteed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.contract.model_reference import LoraSpec
from app.contract.plan import FixedSize, TokenBudget
from app.contract.spec import EarlyStopping, MethodSpec, RampSpec, ValidationSpec
from tests.harness.runs import create_run, log_of, small_data, write_texts
from tests.harness.small_models import make_model, make_window64
from tests.harness.specs import make_optimizer, make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, scale_losses, weights
from workers.training.checkpoints.checkpoint import best, newest_first
from workers.training.data import batch_loader
from workers.training.devices import memory
from workers.training.exceptions import CannotTrain
from workers.training.losses.loss import TokenLoss
from workers.training.models.trainable import prepare_for_training

OPTIMIZERS = ("adamw", "lion", "lamb", "lars", "sgd", "adafactor")


def lora(*, merge: bool = False, targets: tuple[str, ...] | None = None) -> MethodSpec:
    return MethodSpec(
        name="lora", lora=LoraSpec(r=4, alpha=8, dropout=0.1, target_modules=targets, merge=merge)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_resumes_to_the_bit(tmp_path: Path, name: Any) -> None:
    rates = {"sgd": 0.3, "lars": 5.0, "lion": 3e-4, "adafactor": 1e-2}
    spec = make_spec(
        data=small_data(), max_steps=12, save_every=100, gradient_clipping=None,
        optimizer=make_optimizer(name, rates.get(name, 3e-3)),
    )  # fmt: skip
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=8))
    run_to_end(plain)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=8))
    interrupted_at(run, 17)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=8))
    run_to_end(run)
    assert log_of(plain)[-1]["loss"] < 0.97 * log_of(plain)[0]["loss"]
    assert log_of(run) == log_of(plain)
    assert all(torch.equal(a, weights(run)[name]) for name, a in weights(plain).items())


def test_a_missing_optimizer_package_is_reported(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), optimizer=make_optimizer("adamw_8bit")))
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(CannotTrain, match="pip install bitsandbytes"):
            run_to_end(run)


def test_lora_trains_adapters_that_transformers_loads(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec = make_spec(data=small_data(), max_steps=12, method=lora())
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=8))
    outcome = run_to_end(plain)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= set(outcome.files)
    assert "model.safetensors" not in outcome.files
    assert log_of(plain)[-1]["loss"] < log_of(plain)[0]["loss"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-gpt2")
    adapted = PeftModel.from_pretrained(base, plain.model)
    ids = torch.arange(5).unsqueeze(0)
    with adapted.disable_adapter():
        before = adapted(input_ids=ids).logits
    assert not torch.equal(adapted(input_ids=ids).logits, before)

    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=8))  # dropout 0.1, resumed in the middle
    interrupted_at(run, 13)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=8))
    run_to_end(run)
    ours, theirs = (load_file(each.model / "adapter_model.safetensors") for each in (run, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_merged_adapters_are_saved_as_a_standalone_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = make_spec(data=small_data(), max_steps=5, method=lora(merge=True, targets=("c_attn",)))
    run = create_run(tmp_path / "run", spec)
    assert "model.safetensors" in run_to_end(run).files
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-gpt2")
    merged = AutoModelForCausalLM.from_pretrained(run.model)
    changed = {
        name
        for name, tensor in base.state_dict().items()
        if not torch.equal(tensor, merged.state_dict()[name])
    }
    assert changed == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1)}


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_frozen_layers_in_autocasts_precision_give_the_same_bits(family: str) -> None:
    data, adapters = make_window64(), LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
    found = []
    for precision in ("bf16", "fp32"):  # under fp32 nothing is narrowed
        model = prepare_for_training(
            make_model(family),
            lora=adapters,
            seed=0,
            gradient_checkpointing=False,
            freeze=(),
            precision=precision,
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = TokenLoss(model)(data.batch(list(range(8)))).loss_sum
        loss.backward()
        narrowed = [p for p in model.parameters() if p.dtype == torch.bfloat16]
        assert bool(narrowed) is (precision == "bf16")
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_unknown_lora_target_is_reported(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), method=lora(targets=("nothing",))))
    with pytest.raises(CannotTrain, match=r"lora: .*nothing"):
        run_to_end(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": small_data(packing=True)},
        {"accumulate_gradients_on_cpu": True},
        {"gradient_checkpointing": True},
        {"attention": "eager"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_that_save_time_or_memory_do_not_change_the_training(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    spec = make_spec(data=small_data(), max_steps=6, certificate=True)
    plain = create_run(tmp_path / "plain", spec, rule=TokenBudget(tokens=200))
    other = create_run(tmp_path / "other", spec.model_copy(update=changes), rule=TokenBudget(tokens=200))
    if "data" in changes:
        other = create_run(tmp_path / "other", spec.model_copy(update=changes), rule=TokenBudget(tokens=200))
    run_to_end(plain)
    outcome = run_to_end(other)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 1e-5
    for a, b in zip(log_of(plain), log_of(other), strict=True):
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-5)
    assert events_of_kind(other, "changed") == []


def test_packing_leaves_no_padding(tmp_path: Path) -> None:
    run = create_run(
        tmp_path / "run", make_spec(data=small_data(packing=True), max_steps=4), rule=TokenBudget(tokens=200)
    )
    run_to_end(run)
    assert all(line["padded_tokens"] == line["input_tokens"] for line in raw_log(run))


@pytest.mark.parametrize("in_fp32", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_pure_bf16_trains(tmp_path: Path, in_fp32: bool) -> None:
    spec = make_spec(data=small_data(), max_steps=10, accumulate_in_fp32=in_fp32, certificate=True)
    run = create_run(tmp_path / "run", spec, precision="pure_bf16", rule=FixedSize(samples=4))
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error <= 2e-2
    assert log_of(run)[-1]["loss"] < 0.9 * log_of(run)[0]["loss"]
    assert weights(run)["transformer.wte.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_certificate_is_recorded_and_does_not_change_training(tmp_path: Path, precision: str) -> None:
    spec = make_spec(data=small_data(), max_steps=3)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=4), precision=precision)
    run_to_end(plain)
    certified = spec.model_copy(update={"certificate": True})
    run = create_run(tmp_path / "run", certified, rule=FixedSize(samples=4), precision=precision)
    outcome = run_to_end(run)
    [event] = events_of_kind(run, "certificate")
    assert event["data"]["gradient_error"] == outcome.equivalence_error
    assert (event["data"]["micro_batches"], event["data"]["reference_micro_batches"]) == (4, 8)
    if precision != "fp16":  # whose loss scale the certificate may have lowered already
        assert log_of(run) == log_of(plain)


def test_a_validation_share_is_kept_out_of_training(tmp_path: Path) -> None:
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=share), max_steps=None, epochs=2, eval_every=2)
    run = create_run(tmp_path / "run", spec)
    outcome = run_to_end(run)
    assert sum(line["samples"] for line in log_of(run)) == 2 * 32
    evaluations = events_of_kind(run, "evaluation")
    assert [event["data"]["step"] for event in evaluations] == [2, 4]
    assert evaluations[-1]["data"]["loss"] == outcome.eval_loss
    assert outcome.eval_loss < 5.6


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_a_validation_file_is_evaluated_on_exactly(tmp_path: Path, smoothing: float) -> None:
    """The loss is the token-weighted mean of the saved model over the file, however it is cut."""
    import hashlib

    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_texts(tmp_path / "validation.jsonl", 12, seed=9)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    own = ValidationSpec(file_id="file-2", sha256=digest, format="text", share=None)
    run = create_run(
        tmp_path / "run", make_spec(data=small_data(validation=own), max_steps=4, label_smoothing=smoothing)
    )
    assignment = run.assignment().model_copy(update={"validation_file": str(path)})
    run.write_assignment(assignment)
    outcome = run_to_end(run)
    model = AutoModelForCausalLM.from_pretrained(run.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    total = correct = count = 0.0
    for line in path.read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"]).input_ids, 256]])
        with torch.no_grad():
            found = model(input_ids=ids, labels=ids)
        total += float(found.loss) * (ids.shape[1] - 1)
        correct += int((found.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
        count += ids.shape[1] - 1
    assert outcome.eval_loss == pytest.approx(total / count, rel=1e-5)
    assert outcome.eval_token_accuracy == pytest.approx(correct / count)
    [evaluation] = events_of_kind(run, "evaluation")
    assert evaluation["data"]["token_accuracy"] == outcome.eval_token_accuracy


def test_early_stopping_keeps_and_saves_the_best_model(tmp_path: Path) -> None:
    """A rate so high that the validation loss soon rises."""
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(validation=share), max_steps=60, eval_every=2, save_every=100,
        optimizer=make_optimizer("adamw", 0.03), early_stopping=EarlyStopping(patience=3),
    )  # fmt: skip
    run = create_run(tmp_path / "run", spec)
    outcome = run_to_end(run)
    assert outcome.best_step is not None
    assert outcome.steps == outcome.best_step + 6 < 60
    losses = {event["data"]["step"]: event["data"]["loss"] for event in events_of_kind(run, "evaluation")}
    assert outcome.eval_loss == min(losses.values()) == losses[outcome.best_step]
    by_step = {event["data"]["step"]: event["data"] for event in events_of_kind(run, "evaluation")}
    assert outcome.eval_token_accuracy == by_step[outcome.best_step]["token_accuracy"]
    kept = best(run.checkpoints)
    assert kept is not None
    saved = load_file(kept / "model.safetensors")
    assert all(
        torch.equal(tensor, weights(run)[name]) for name, tensor in saved.items() if name in weights(run)
    )
    assert len(newest_first(run.checkpoints)) <= 3


def test_an_evaluated_run_resumes_to_the_bit(tmp_path: Path) -> None:
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=share), max_steps=8, eval_every=2, save_every=100)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=4))
    run_to_end(plain)
    for looks in (9, 10, 11, 12):
        run = create_run(tmp_path / f"run{looks}", spec, rule=FixedSize(samples=4))
        interrupted_at(run, looks)
        create_run(tmp_path / f"run{looks}", spec, attempt=2, rule=FixedSize(samples=4))
        run_to_end(run)
        assert log_of(run) == log_of(plain)
        steps = {event["data"]["step"] for event in events_of_kind(run, "evaluation")}
        assert steps == {2, 4, 6, 8}


@pytest.mark.parametrize("name", ["linear", "noise_scale", "loss_variance"])
def test_a_ramp_grows_the_batch_and_resumes_where_it_was(tmp_path: Path, name: Any) -> None:
    ramp = RampSpec(name=name, warmup_steps=4, loss_variance_threshold=1e-9, max_effective_batch_size=40)
    spec = make_spec(
        data=small_data(),
        max_steps=14,
        ramp=ramp,
        effective_batch_size=8,
        noise_scale_every=1,
        save_every=100,
    )
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=2))
    run_to_end(plain)
    sizes = [line["effective_batch_size"] for line in raw_log(plain)]
    if name == "linear":
        assert sizes[:6] == [2, 4, 5, 7, 8, 8]
    elif name == "loss_variance":
        assert sizes == [8] * 10 + [16, 16, 8, 16]  # of an epoch of forty, eight are left for its third
    else:
        assert all(8 <= size <= 40 for size in sizes)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=2))
    interrupted_at(run, 30)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=2))
    run_to_end(run)
    assert log_of(run) == log_of(plain)


def test_a_loss_spike_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twelfth window's loss is tripled: no step is made of it, and its highest samples are named."""
    calls = 0

    def tripled(batch: Any) -> float:
        nonlocal calls
        calls += 1
        return 3.0 if calls == 12 else 1.0

    scale_losses(monkeypatch, tripled)
    spec = make_spec(data=small_data(), max_steps=14, loss_spike_zscore=4.0)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=16))
    run_to_end(run)
    [skipped] = events_of_kind(run, "skipped")
    assert "spike" in skipped["message"]
    assert 1 <= len(skipped["data"]["samples"]) <= 5
    assert [line["step"] for line in log_of(run)] == list(range(1, 15))


def test_a_skipped_window_leaves_weights_and_moments_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    from workers.training import fit as training

    honest, compared = training.train_window, []

    def watched(run: Any, window: Any, denominator: float) -> Any:
        before = [p.detach().clone() for p in run.replica.model.parameters()]
        moments = [v.clone() for s in run.replica.optimizer.state.values() for v in s.values()]
        trained = honest(run, window, denominator)
        if not trained.result.applied:
            after = [v for s in run.replica.optimizer.state.values() for v in s.values()]
            same = all(torch.equal(a, b) for a, b in zip(before, run.replica.model.parameters(), strict=True))
            compared.append(same and all(torch.equal(a, b) for a, b in zip(moments, after, strict=True)))
        return trained

    monkeypatch.setattr(training, "train_window", watched)
    calls = 0

    def broken(batch: Any) -> float:
        nonlocal calls
        calls += 1
        return float("nan") if calls == 2 else 1.0

    scale_losses(monkeypatch, broken)
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=None, epochs=2))
    run_to_end(run)
    assert len(events_of_kind(run, "skipped")) == 1
    assert compared == [True]


def test_logs_on_request(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=3, log_micro_losses=True, log_gradients=True)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=4))
    run_to_end(run)
    for line in raw_log(run):
        assert len(line["micro_losses"]) == line["gradient_accumulation_steps"] > 1
        assert min(line["micro_losses"]) < line["loss"] < max(line["micro_losses"])
        norms = line["gradient_norms"]
        assert {"transformer.h.0", "transformer.h.1", "transformer.wte"} <= norms.keys()
        assert sum(norm**2 for norm in norms.values()) == pytest.approx(line["grad_norm"] ** 2, rel=1e-5)


def test_a_profile_on_request(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=4, profile=True))
    run_to_end(run)
    [event] = events_of_kind(run, "profile")
    assert {"data", "forward", "backward", "synchronise", "optimizer"} == event["data"]["seconds"].keys()
    assert all(seconds > 0 for seconds in event["data"]["seconds"].values())
    assert json.loads((run.path / "profile" / "trace.json").read_text())["traceEvents"]
    operators = json.loads((run.path / "profile" / "operators.json").read_text())["data"]
    assert "aten::addmm" in [operator["name"] for operator in operators]
    costs = [operator["own_seconds"] for operator in operators]
    assert costs == sorted(costs, reverse=True)


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=share), max_steps=4, report_to=("tensorboard",))
    run = create_run(tmp_path / "run", spec)
    outcome = run_to_end(run)
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    logged = [point.value for point in events.Scalars("train/loss")]
    assert logged == pytest.approx([line["loss"] for line in log_of(run)])
    assert events.Scalars("validation/loss")[-1].value == pytest.approx(outcome.eval_loss)


def test_the_banner_says_what_will_happen(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=2))
    run_to_end(run)
    [event] = events_of_kind(run, "training")
    assert event["data"]["banner"].keys() == {
        "epochs", "steps", "optimizer", "learning rate", "weight decay", "device", "micro-batch",
        "accumulation steps", "effective batch", "precision", "predicted memory",
    }  # fmt: skip
    assert "effective batch 16" in event["message"]
    first = json.loads(run.metrics.read_text().splitlines()[0])
    (saved,) = events_of_kind(run, "checkpoint")  # which is the last step's, and told of once
    assert saved["data"]["step"] == 2
    told = event["data"]["banner"]["accumulation steps"]
    assert told == f"about {first['gradient_accumulation_steps']}"
    each = -(-16 // first["gradient_accumulation_steps"])
    whole = event["data"]["banner"]["effective batch"]
    assert whole == f"16, about {first['gradient_accumulation_steps']} × {each}"


def test_line_weights_scale_their_share_of_the_loss(tmp_path: Path) -> None:
    """A line of weight 3 trains like three of the same line; one of weight 0 like none."""
    texts = [f"text number {i} " + "x" * i for i in range(8)]
    weighted = [{"text": text, "weight": [1, 3, 0, 1][i % 4]} for i, text in enumerate(texts)]
    repeated = [{"text": line["text"]} for line in weighted for _ in range(int(line["weight"]))]
    losses = []
    for name, lines in (("weighted", weighted), ("repeated", repeated)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        spec = make_spec(
            data=small_data(examples=len(lines)), max_steps=5, effective_batch_size=len(lines), epochs=None
        )
        run = create_run(folder / "run", spec)
        run_to_end(run)
        losses.append([line["loss"] for line in log_of(run)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_more_memory_than_a_cpu_job_may_use_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: with more than 8 samples at once, 1 GiB seems to be in use, twice the limit."""
    limit, taken = 2**29, {"peak": 2**30}  # of loading the model, which is no window's fault
    monkeypatch.setattr(memory, "in_use", lambda device: 2**28)
    monkeypatch.setattr(memory, "peak", lambda device: taken["peak"])
    monkeypatch.setattr(memory, "reset_peak", lambda device: taken.update(peak=2**28))
    collated = batch_loader.collate

    def taking(rows: Any, *others: Any) -> Any:
        taken["peak"] = max(taken["peak"], 2**30 if len(rows) > 8 else 2**28)
        return collated(rows, *others)

    monkeypatch.setattr(batch_loader, "collate", taking)
    spec = make_spec(data=small_data(), max_steps=3)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=16), memory_limit_bytes=limit)
    run_to_end(run)
    events = events_of_kind(run, "out_of_memory")
    assert "replayed with at most" in events[0]["message"]
    assert [line["step"] for line in log_of(run)] == [1, 2, 3]
    assert all(line["physical_batch_size"] <= 8 for line in raw_log(run))


def test_unknown_keys_of_the_data_are_reported_once(tmp_path: Path) -> None:
    lines = [{"text": f"text number {i}", "source": "a", "id": i} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=2))
    run_to_end(run)
    [event] = events_of_kind(run, "data")
    assert event["level"] == "warning"
    assert "unknown keys, ignored: 'id', 'source'" in event["message"]


def test_a_requested_stop_keeps_the_current_weights_even_with_early_stopping(tmp_path: Path) -> None:
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(validation=share), max_steps=60, eval_every=2, save_every=100,
        optimizer=make_optimizer("adamw", 0.03), early_stopping=EarlyStopping(patience=50),
    )  # fmt: skip
    run = create_run(tmp_path / "run", spec)
    interrupted_at(run, 150)
    create_run(tmp_path / "run", spec, attempt=2)
    run.request_finish()
    outcome = run_to_end(run)
    assert outcome.best_step is not None
    assert outcome.best_step < outcome.steps < 60
    (newest, *_) = newest_first(run.checkpoints)
    kept = load_file(newest / "model.safetensors")
    assert all(
        torch.equal(tensor, weights(run)[name]) for name, tensor in kept.items() if name in weights(run)
    )
    assert not events_of_kind(run, "best")
    last = events_of_kind(run, "evaluation")[-1]["data"]
    assert (outcome.eval_loss, outcome.steps) == (last["loss"], last["step"])
