"""The trainer as a whole, in this process."""

import json
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.contract.plan import FixedCount, FixedSize, TokenBudget
from app.contract.spec import RampSpec, ValidationSpec
from tests.harness.runs import create_run, events_of, log_of, small_data, until, write_texts
from tests.harness.specs import make_schedule, make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, scale_losses, weights
from workers.run_directory import RunDirectory
from workers.training.checkpoints.checkpoint import newest_first
from workers.training.devices.stopwatch import Stopwatch
from workers.training.exceptions import CannotTrain, Interrupted
from workers.training.micro_batches.batches import epoch_order
from workers.training.models.tiny_gpt2 import make_tokenizer
from workers.training.models.trainable import recompute_activations
from workers.training.replica import Replica


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm())


def test_an_optimizer_s_step_that_took_longer_than_the_next_window_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the host goes on during the step, whose time is that of the previous window."""

    class Lagging(Stopwatch):
        lags = True  # type: ignore[assignment]

        def seconds(self) -> float:
            return 100.0 if self._used else 0.0

    monkeypatch.setattr("workers.training.window.Stopwatch", Lagging)
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=3))
    run_to_end(run)
    for line in raw_log(run):
        assert line["forward_backward_seconds"] >= 0
        assert line["optimizer_seconds"] < 100


def test_a_run_trains_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=30))
    outcome = run_to_end(run)
    lines = log_of(run)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert outcome.final_loss == lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert outcome.trained_tokens == sum(line["tokens"] for line in lines)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 3, 260)
    assert set(outcome.files) >= {"model.safetensors", "config.json", "tokenizer.json"}


@pytest.mark.parametrize(
    "cut", [TokenBudget(tokens=200), FixedCount(micro_batches=16), FixedSize(samples=3)], ids=str
)
def test_the_plan_does_not_change_the_training(tmp_path: Path, cut: Any) -> None:
    """Same spec, another cut: the same losses and weights, to rounding; samples, tokens and order equal."""
    spec = make_spec(data=small_data(), max_steps=8)
    whole = create_run(tmp_path / "whole", spec, rule=FixedCount(micro_batches=1))
    other = create_run(tmp_path / "other", spec, rule=cut)
    run_to_end(whole)
    run_to_end(other)
    for a, b in zip(log_of(whole), log_of(other), strict=True):
        assert (a["samples"], a["tokens"], a["epoch"]) == (b["samples"], b["tokens"], b["epoch"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    initial = dict(load_file(tmp_path / "tiny-gpt2" / "model.safetensors"))
    assert distance(weights(whole), weights(other)) <= 1e-3 * distance(weights(whole), initial)


def test_the_partial_window_makes_its_own_step(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=None, epochs=2))
    run_to_end(run)
    assert [(line["epoch"], line["samples"]) for line in log_of(run)] == [
        (0, 16), (0, 16), (0, 8), (1, 16), (1, 16), (1, 8),
    ]  # fmt: skip


def test_the_rate_steps_with_updates(tmp_path: Path) -> None:
    schedule = make_schedule("linear", warmup_steps=2)
    run = create_run(
        tmp_path / "run",
        make_spec(data=small_data(), max_steps=4, schedule=schedule),
        rule=FixedSize(samples=1),
    )
    run_to_end(run)
    assert [line["learning_rate"] for line in log_of(run)] == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


@pytest.mark.parametrize("looks", [0, 1, 7, 8, 29])
def test_an_interrupted_run_ends_bit_for_bit_as_if_nothing_had_happened(tmp_path: Path, looks: int) -> None:
    spec = make_spec(data=small_data(), max_steps=None, epochs=4, save_every=100)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=4))
    run_to_end(plain)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=4))
    interrupted_at(run, looks)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=4))
    run_to_end(run)
    assert log_of(run) == log_of(plain)
    assert all(torch.equal(a, weights(run)[name]) for name, a in weights(plain).items())
    ends = [newest_first(each.checkpoints)[0] for each in (plain, run)]
    moments = [load_file(end / "optimizer.safetensors") for end in ends]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())


def test_a_resume_with_a_different_cut_neither_skips_nor_repeats_samples(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=None, epochs=2)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=8))
    interrupted_at(run, 6)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=2))
    run_to_end(run)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=8))
    run_to_end(plain)
    for a, b in zip(log_of(plain), log_of(run), strict=True):
        assert (a["epoch"], a["samples"], a["tokens"]) == (b["epoch"], b["samples"], b["tokens"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_dropout_is_the_same_after_a_resume(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

    ensure_tiny_gpt2(tmp_path / "tiny-gpt2")
    config = json.loads((tmp_path / "tiny-gpt2" / "config.json").read_text())
    (tmp_path / "tiny-gpt2" / "config.json").write_text(
        json.dumps({**config, "resid_pdrop": 0.2, "embd_pdrop": 0.2})
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-gpt2").config.resid_pdrop == 0.2
    spec = make_spec(data=small_data(), max_steps=6)
    plain, run = (create_run(tmp_path / name, spec, rule=FixedSize(samples=4)) for name in ("plain", "run"))
    run_to_end(plain)
    interrupted_at(run, 13)
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=4))
    run_to_end(run)
    assert log_of(run) == log_of(plain)


def poison(monkeypatch: pytest.MonkeyPatch, marker: int) -> None:
    """Makes the loss of every batch with the marker token NaN."""
    scale_losses(monkeypatch, lambda batch: float("nan") if bool((batch.input_ids == marker).any()) else 1.0)


def test_a_sample_with_non_finite_loss_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    write_texts(data)
    lines = data.read_text().splitlines()
    lines[17] = json.dumps({"text": "Q is the marker"})
    data.write_text("\n".join(lines))
    poison(monkeypatch, make_tokenizer()("Q").input_ids[0])
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=None, epochs=1))
    outcome = run_to_end(run)
    skipped = [event for event in events_of(run) if event["type"] == "skipped"]
    assert [event["data"]["samples"] for event in skipped] == [[17]]
    assert outcome.steps == 2
    assert json.loads(run.metrics.read_text().splitlines()[-1])["skipped"] in (0, 1)


def test_a_skipped_first_window_does_not_leave_a_job_without_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    write_texts(data)
    spec = make_spec(data=small_data(), max_steps=3, certificate=True)
    lines = data.read_text().splitlines()
    lines[epoch_order(40, spec.seed, 0)[0]] = json.dumps({"text": "Q is the marker"})
    data.write_text("\n".join(lines))
    poison(monkeypatch, make_tokenizer()("Q").input_ids[0])
    run = create_run(tmp_path / "run", spec)
    outcome = run_to_end(run)
    certificates = [
        event["data"]["gradient_error"] for event in events_of(run) if event["type"] == "certificate"
    ]
    assert certificates[0] is None
    assert len(certificates) == 2
    assert outcome.equivalence_error == certificates[1] <= 1e-5


def test_a_run_that_diverges_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_losses(monkeypatch, lambda batch: float("nan"))
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=50))
    with pytest.raises(CannotTrain, match="10 windows in a row were skipped"):
        run_to_end(run)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_running_out_of_memory_changes_the_plan_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    spec = make_spec(data=small_data(), max_steps=5)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=8))
    run_to_end(plain)
    calls = 0

    def failing(batch: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("injected")
        return 1.0

    scale_losses(monkeypatch, failing)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=8))
    run_to_end(run)
    assert [event["type"] for event in events_of(run)].count("out_of_memory") == 1
    assert log_of(run)[-1]["micro_step"] > log_of(plain)[-1]["micro_step"]
    for a, b in zip(log_of(plain), log_of(run), strict=True):
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_one_sample_that_does_not_fit_ends_the_job_with_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(batch: Any) -> float:
        raise torch.OutOfMemoryError("injected")

    scale_losses(monkeypatch, failing)
    run = create_run(tmp_path / "run", make_spec(data=small_data()))
    with pytest.raises(CannotTrain, match=r"method: lora \(0\.\d\d GiB\)"):
        run_to_end(run)
    told = [event["message"] for event in events_of(run) if event["type"] == "out_of_memory"]
    assert "replayed with gradient checkpointing" in told[-1]


def test_one_sample_that_does_not_fit_is_trained_with_gradient_checkpointing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast's copies of the weights are kept no longer, also after a resume."""
    spec = make_spec(data=small_data(), max_steps=3)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=1), precision="bf16")
    run_to_end(plain)
    recomputing, autocast, kept = False, Replica.autocast, []

    def watched(replica: Replica) -> Any:
        with autocast(replica):
            kept.append((recomputing, torch.is_autocast_cache_enabled()))
        return autocast(replica)

    def failing(batch: Any) -> float:
        if not recomputing:
            raise torch.OutOfMemoryError("injected")
        return 1.0

    def switched_on(model: Any) -> None:
        nonlocal recomputing
        recomputing = True
        recompute_activations(model)

    scale_losses(monkeypatch, failing)
    monkeypatch.setattr("workers.training.accumulate.recompute_activations", switched_on)
    monkeypatch.setattr(Replica, "autocast", watched)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=1), precision="bf16")
    interrupted_at(run, 20)
    assert 0 < len(log_of(run)) < 3
    assert set(kept) == {(False, True), (True, False)}
    kept.clear()
    run_to_end(run)
    assert set(kept) == {(True, False)}
    for a, b in zip(log_of(plain), log_of(run), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_like_fp32(tmp_path: Path, precision: str) -> None:
    spec = make_spec(data=small_data(), max_steps=10)
    plain = create_run(tmp_path / "plain", spec)
    half = create_run(tmp_path / "half", spec, precision=precision)
    run_to_end(plain)
    run_to_end(half)
    for a, b in zip(log_of(plain), log_of(half), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-2)
    assert weights(half)["transformer.wte.weight"].dtype == torch.float32


def test_frozen_parameters_do_not_change(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), freeze=("transformer.h.0.*",)))
    run_to_end(run)
    initial, trained = load_file(tmp_path / "tiny-gpt2" / "model.safetensors"), weights(run)
    moved = {name for name in initial if not torch.equal(initial[name], trained[name])}
    assert moved
    assert not any(name.startswith("transformer.h.0.") for name in moved)


def test_the_other_name_of_a_shared_weight_freezes_it(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), freeze=("lm_head.*",)))
    run_to_end(run)
    initial, trained = load_file(tmp_path / "tiny-gpt2" / "model.safetensors"), weights(run)
    assert torch.equal(initial["transformer.wte.weight"], trained["transformer.wte.weight"])


def test_gradient_checkpointing_trains_the_same(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=4)
    plain = create_run(tmp_path / "plain", spec)
    saving = create_run(tmp_path / "saving", spec.model_copy(update={"gradient_checkpointing": True}))
    run_to_end(plain)
    run_to_end(saving)
    for a, b in zip(log_of(plain), log_of(saving), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


@pytest.mark.parametrize("patterns", [("nothing.*",), ("*",)])
def test_freezing_nothing_or_everything_is_refused(tmp_path: Path, patterns: tuple[str, ...]) -> None:
    with pytest.raises(CannotTrain, match="freeze"):
        run_to_end(create_run(tmp_path / "run", make_spec(data=small_data(), freeze=patterns)))


def test_damaged_checkpoints_are_reported_and_the_job_fails_if_all_are(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=10, save_every=4)
    run = create_run(tmp_path / "run", spec)
    run_to_end(run)
    newest, older = newest_first(run.checkpoints)
    (newest / "model.safetensors").write_bytes(b"")
    run_to_end(run)
    kinds = [event["type"] for event in events_of(run)]
    assert "checkpoint_damaged" in kinds
    assert "resumed" in kinds
    for path in newest_first(run.checkpoints):
        (path / "state.json").unlink()
    with pytest.raises(CannotTrain, match="every checkpoint is damaged"):
        run_to_end(run)
    assert older.exists()


def test_a_run_pauses_between_windows_while_a_gpu_is_too_hot(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=2)
    plain, paused = (create_run(tmp_path / name, spec) for name in ("plain", "paused"))
    run_to_end(plain)
    paused.request_cooling_down("its GPU cpu is hotter than 80 °C")
    with ThreadPoolExecutor(1) as others:
        cooled = others.submit(cool_down, paused)
        run_to_end(paused)
        cooled.result()
    assert [kind for kind in kinds_of(paused) if kind.startswith("cool")] == ["cooling_down", "cooled_down"]
    assert "Training pauses after step 0: its GPU cpu is hotter than 80 °C." in {
        event["message"] for event in events_of(paused)
    }
    assert distance(weights(plain), weights(paused)) == 0


def test_a_run_that_pauses_can_be_stopped_and_finished(tmp_path: Path) -> None:
    spec = make_spec(data=small_data(), max_steps=1000)
    run = create_run(tmp_path / "run", spec)
    run.request_cooling_down("hot")
    with pytest.raises(Interrupted):
        run_to_end(run, stop=lambda: "cooling_down" in kinds_of(run))
    run.request_finish()
    assert run_to_end(run).steps == 1


def cool_down(run: RunDirectory) -> None:
    until(lambda: "cooling_down" in kinds_of(run))
    run.end_cooling_down()


def kinds_of(run: RunDirectory) -> list[str]:
    return [event["type"] for event in events_of(run)] if run.events.exists() else []


def test_stopping_a_run_keeps_a_model_that_has_not_changed_yet(tmp_path: Path) -> None:
    """The first step of a warmup has the learning rate 0. The evaluation at the end leaves the request as it
    is."""
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    schedule = make_schedule("linear", warmup_steps=10)
    spec = make_spec(data=small_data(validation=share), max_steps=1000, schedule=schedule)
    run = create_run(tmp_path / "run", spec)
    run.request_finish()
    assert run_to_end(run).steps == 1
    assert [event["type"] for event in events_of(run)].count("stopped_early") == 1


def test_stopping_a_run_saves_the_model_of_the_current_step(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=1000))
    run.request_finish()  # before the first step, which is made nevertheless
    outcome = run_to_end(run)
    assert outcome.steps == 1
    assert "model.safetensors" in outcome.files
    stopped = [event for event in events_of(run) if event["type"] == "stopped_early"]
    assert [event["message"] for event in stopped] == ["Stopped as requested at step 1 of 1000."]
    [line] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert line["peak_gb"] >= line["memory_gb"]
    assert 0 < line["synchronise_seconds"] < line["forward_backward_seconds"]


def test_a_model_without_gradient_checkpointing_runs_out_of_memory_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(model: Any) -> None:
        raise CannotTrain("not_supported", "gradient_checkpointing: it does not support it")

    def failing(batch: Any) -> float:
        raise torch.OutOfMemoryError("injected")

    scale_losses(monkeypatch, failing)
    monkeypatch.setattr("workers.training.accumulate.recompute_activations", unsupported)
    run = create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=3), rule=FixedSize(samples=1))
    with pytest.raises(CannotTrain, match="the model does not support gradient checkpointing") as error:
        run_to_end(run)
    assert error.value.code == "out_of_memory"


def test_the_gradient_check_compares_the_batch_that_a_ramp_ends_with(tmp_path: Path) -> None:
    ramp = RampSpec(name="linear", warmup_steps=100, loss_variance_threshold=0.01, max_effective_batch_size=8)
    spec = make_spec(data=small_data(), max_steps=2, certificate=True, ramp=ramp)
    assert spec.batch_at(0) == 1
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=4))
    outcome = run_to_end(run)
    [event] = events_of_kind(run, "certificate")
    assert "between 4 and 8 micro-batches" in event["message"]
    assert outcome.equivalence_error is not None


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_without_weight_are_no_steps_of_the_schedule(tmp_path: Path, batch: int) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": f"abc{n}", "weight": n % 2}) + "\n" for n in range(40))
    )
    schedule = make_schedule("linear", warmup_steps=0)
    spec = make_spec(
        data=small_data(), max_steps=None, epochs=2, effective_batch_size=batch, schedule=schedule
    )
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=1))
    outcome = run_to_end(run)
    lines = log_of(run)
    rates = [line["learning_rate"] for line in lines]
    assert len(lines) == outcome.steps
    assert rates[-1] == pytest.approx(rates[0] / outcome.steps)  # the next one would be 0
    skipped = events_of_kind(run, "skipped")
    assert len(skipped) <= 4, "the first of each epoch, and the last if it ends the epoch"
    windows = 2 * ceil(40 / batch)
    counted = max([line["skipped"] for line in raw_log(run)] + [each["data"]["skipped"] for each in skipped])
    assert counted == windows - outcome.steps
    assert bool(skipped) == (outcome.steps < 2 * ceil(40 / batch))
