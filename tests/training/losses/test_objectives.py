"""Objectives other than supervised fine-tuning: the gradient of a window does not depend on its split, and is
that of the papers."""

import hashlib
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from app.contract.model_reference import LoraSpec
from app.contract.objective import OtherObjectiveName
from app.contract.plan import FixedCount
from app.contract.spec import MethodSpec, Strategy
from tests.harness.any_family import make_any, small_config
from tests.harness.preferences import (
    CLASSES,
    OBJECTIVES,
    PREFERENCES,
    difference,
    gradients_of,
    make_model,
    objective_spec,
    plain_losses,
    preference_data,
    preference_run,
    preference_samples,
    scores_of,
)
from tests.harness.runs import events_of, log_of, start_trainer, until, with_ranks
from tests.harness.specs import make_optimizer
from tests.harness.training import finished, interrupted_at, raw_log, run_to_end, trains_alike, weights
from workers.training.data.preparation import Samples, prepare
from workers.training.exceptions import CannotTrain
from workers.training.losses.loss import _of_each_state
from workers.training.losses.objectives import log1mexp
from workers.training.micro_batches.batches import BatchLayout, Groups, cut_window
from workers.training.models.dropout import restore_dropout, turn_dropout_off
from workers.training.models.head import Head
from workers.training.models.tiny_gpt2 import make_tokenizer
from workers.training.replica import Replica

_EXACT = 1e-12


@pytest.fixture(params=OBJECTIVES)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def samples(tmp_path: Path, name: OtherObjectiveName) -> Samples:
    return preference_samples(tmp_path, objective_spec(name), weighted=True)


@pytest.mark.parametrize("family", ["gpt2", "llama", "nanochat"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_split_changes_the_gradient(
    samples: Samples, name: OtherObjectiveName, family: str, packed: bool
) -> None:
    """Random micro-batches with the head in chunks, against one batch of full logits."""
    if family == "nanochat" and scores_of(name):
        pytest.skip("transformers has no class for sequence classification of this family")
    model, everything = make_model(family, scores=scores_of(name)), list(range(len(samples)))
    whole, expected, _ = gradients_of(model, samples, [everything], chunked=False)

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.permutations(everything), st.integers(1, len(everything)), st.integers(1, 60))
    def same(order: list[int], count: int, chunk: int) -> None:
        groups: Groups = [each.tolist() for each in np.array_split(np.array(order), count)]
        loss, found, _ = gradients_of(
            model, samples, groups, layout=BatchLayout(pad_id=0, packed=packed), chunk=chunk
        )
        assert loss == pytest.approx(whole, rel=_EXACT)
        assert difference(found, expected) < _EXACT

    same()


def test_it_is_the_loss_of_the_paper(samples: Samples, name: OtherObjectiveName) -> None:
    """Against plain formulas, each sequence computed alone, differentiated by autograd."""
    model = make_model("gpt2", scores=scores_of(name))  # whose norms are not in fp32
    loss = plain_losses(model, samples, range(len(samples)))
    loss.backward()
    expected = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    groups = cut_window(samples.lengths, FixedCount(micro_batches=5))
    found_loss, found, _ = gradients_of(model, samples, groups, chunk=7)
    assert found_loss == pytest.approx(float(loss.detach()), rel=_EXACT)
    assert difference(found, expected) < _EXACT


def test_label_smoothing_and_weights_of_labels_count(tmp_path: Path) -> None:
    for number, spec in enumerate(
        (
            objective_spec("dpo", beta=0.3, label_smoothing=0.2),
            objective_spec("kto", desirable_weight=0.5, undesirable_weight=2.0),
            objective_spec("simpo", beta=2.5, gamma=0.4),
            objective_spec("reward", center_rewards_coefficient=0.3),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        samples, model = preference_samples(folder, spec), make_model("gpt2", scores=scores_of(spec.name))
        expected = plain_losses(model, samples, range(len(samples)))
        loss, _, _ = gradients_of(model, samples, [list(range(len(samples)))])
        assert loss == pytest.approx(float(expected.detach()), rel=_EXACT)


def test_in_fp32_splits_agree_to_rounding(samples: Samples, name: OtherObjectiveName) -> None:
    model = make_model("llama", torch.float32, scores=scores_of(name))
    everything = list(range(len(samples)))
    _, expected, _ = gradients_of(model, samples, [everything])
    _, found, _ = gradients_of(model, samples, [[each] for each in everything], chunk=8)
    assert difference(found, expected) < 1e-5


def test_what_is_measured_does_not_depend_on_the_split(samples: Samples, name: OtherObjectiveName) -> None:
    model, everything = make_model("gpt2", scores=scores_of(name)), list(range(len(samples)))
    _, _, whole = gradients_of(model, samples, [everything])
    _, _, parts = gradients_of(model, samples, [[each] for each in everything])
    assert parts == pytest.approx(whole, rel=_EXACT)


def test_a_pair_is_never_split(tmp_path: Path) -> None:
    samples = preference_samples(tmp_path, objective_spec("dpo"))
    assert samples.sequences == samples.stored_sequences == 2
    assert len(samples) == 24
    pairs = samples.sequence_lengths
    assert (samples.lengths == 2 * pairs.max(1)).all(), "both sequences, padded to the longer one"
    assert (samples.tokens == pairs.sum(1)).all()


def test_a_mismatch_has_an_answer_to_another_prompt(tmp_path: Path) -> None:
    """Also where a file lists several answers to a prompt; and without another prompt, none of it counts."""

    def prepared(folder: str, prompts: list[str], without: int = 0) -> Samples:
        source = tmp_path / f"{folder}.jsonl"
        rows = [{"prompt": each, "completion": f" {n}", "label": True} for n, each in enumerate(prompts)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        data = preference_data("kto", len(rows), sha256=digest)
        statistics = prepare(data, source, make_tokenizer(), tmp_path / folder)
        assert statistics.without_mismatch == without
        assert bool(statistics.notes(64)) is (without > 0)
        return Samples(tmp_path / folder)

    tokenizer = make_tokenizer()
    samples = prepared("two", ["a", "a", "b", "b", "c"])
    texts = [tokenizer.decode(samples.read(number, 1)[0], skip_special_tokens=True) for number in range(5)]
    assert texts == ["a 4", "a 4", "b 1", "b 1", "c 3"]
    alike = prepared("alike", ["a", "a", "a"], without=3)
    assert (alike.sequence_targets[:, 1] == 0).all()
    alike.begin_objective(objective_spec("kto"))
    loss, _, _ = gradients_of(make_model("gpt2"), alike, [[0, 1], [2]])
    assert np.isfinite(loss)


def test_a_mismatch_is_a_prompt_with_the_completion_before_it(tmp_path: Path) -> None:
    samples = preference_samples(tmp_path, objective_spec("kto"), 5)
    for number in range(5):
        tokens, counts = samples.read(number)
        other, other_counts = samples.read(number - 1 if number else 4)
        mismatch, mismatch_counts = samples.read(number, 1)
        prompt = tokens[: int(np.argmax(counts))].tolist()
        assert mismatch.tolist() == prompt + other[int(np.argmax(other_counts)) :].tolist()
        assert int(mismatch_counts.sum()) == int(other_counts.sum())


@pytest.mark.parametrize("paired", ["dpo", "orpo", "simpo", "reward"])
def test_a_pair_whose_answer_was_cut_off_does_not_count(tmp_path: Path, paired: OtherObjectiveName) -> None:
    """If max_length leaves nothing of one answer, there is nothing to compare."""
    source = tmp_path / "data.jsonl"
    rows = [
        {"prompt": "p" * 80, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = preference_data(paired, 2, sha256=hashlib.sha256(source.read_bytes()).hexdigest())
    prepared = prepare(data, source, make_tokenizer(), tmp_path / "prepared")
    samples = Samples(tmp_path / "prepared")
    samples.begin_objective(objective_spec(paired))
    assert prepared.without_targets == 1
    assert samples.denominator(np.arange(2)) == 1.0
    model = make_model("gpt2", scores=scores_of(paired))
    loss, found, measured = gradients_of(model, samples, [[0, 1]])
    alone = plain_losses(model, samples, [1])
    alone.backward()
    assert loss == pytest.approx(float(alone.detach()), rel=_EXACT)
    expected = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    assert difference(found, expected) < _EXACT
    assert measured[-1] == 1.0


@pytest.mark.parametrize("probability", [1e-30, 1e-8, 0.1, 0.5, 0.9, 1 - 1e-9])
def test_the_odds_are_precise(probability: float) -> None:
    given_log = torch.tensor(log(probability), dtype=torch.float64, requires_grad=True)
    rest = log1mexp(given_log)
    rest.backward()
    exact = np.log1p(-np.longdouble(probability))
    assert float(rest.detach()) == pytest.approx(float(exact), rel=1e-6)
    assert given_log.grad is not None
    assert bool(torch.isfinite(given_log.grad))


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_run_learns_what_is_preferred(tmp_path: Path, name: OtherObjectiveName) -> None:
    run = preference_run(tmp_path, name)
    outcome = run_to_end(run)
    log = raw_log(run)
    assert len(log) == 10
    assert log[-1]["rewards"]["margin"] > log[0]["rewards"]["margin"]
    assert log[-1]["loss"] < log[0]["loss"]
    if name == "dpo":
        assert log[0]["loss"] == pytest.approx(log_2, abs=1e-6), "the model is its own reference at first"
    (certified,) = [event for event in events_of(run) if event["type"] == "certificate"]
    assert certified["data"]["gradient_error"] < 1e-5
    evaluations = [event["data"] for event in events_of(run) if event["type"] == "evaluation"]
    assert [each["step"] for each in evaluations] == [5, 10]
    assert all(each["rewards"]["margin"] is not None for each in evaluations)
    assert outcome.eval_rewards is not None
    assert outcome.eval_token_accuracy is None


log_2 = log(2)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_learns_to_classify(tmp_path: Path, method: str) -> None:
    """The saved model answers as transformers' pipeline uses it, one text at a time or several at once."""
    lora = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
    own = MethodSpec(name="lora", lora=lora) if method == "lora" else MethodSpec(name="full", lora=None)
    run = preference_run(
        tmp_path, "classification", max_steps=60, method=own, optimizer=make_optimizer("adamw", 1e-2)
    )
    outcome = run_to_end(run)
    log = raw_log(run)
    assert log[0]["loss"] == pytest.approx(log_of_classes, abs=0.2), "nothing is known at first"
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    assert log[-1]["rewards"] is None
    assert outcome.eval_token_accuracy is not None
    assert outcome.eval_token_accuracy > 0.7
    assert outcome.eval_token_accuracy == outcome.eval_exact_match
    (certified,) = [event for event in events_of(run) if event["type"] == "certificate"]
    assert certified["data"]["gradient_error"] < 1e-5
    model = AutoModelForSequenceClassification.from_pretrained(
        run.base if method == "lora" else run.model, num_labels=len(CLASSES)
    )
    if method == "lora":
        model = PeftModel.from_pretrained(model, run.model).merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.id2label = dict(enumerate(CLASSES))
    ask = pipeline("text-classification", model=model, tokenizer=tokenizer)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows]
    alone, together = ask(texts), ask(texts, batch_size=8)
    assert [each["label"] for each in alone] == [each["label"] for each in together]
    right = sum(each["label"] == row["label"] for each, row in zip(alone, rows, strict=True))
    assert right / len(rows) > 0.8
    if method == "full":
        saved = AutoConfig.from_pretrained(run.model)
        assert saved.id2label == dict(enumerate(CLASSES))
        assert saved.architectures == ["GPT2ForSequenceClassification"]


log_of_classes = log(len(CLASSES))


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path, name: OtherObjectiveName, killed: bool
) -> None:
    if killed and name != "dpo":
        pytest.skip("the others are stopped, which takes less time")
    whole, parts = (preference_run(tmp_path / each, name) for each in ("whole", "parts"))
    if killed:
        trainer = start_trainer(parts)
        until(lambda: parts.metrics.exists() and len(parts.metrics.read_text().splitlines()) > 5)
        trainer.kill()
        trainer.wait()
        finished(whole)
        finished(parts)
    else:
        interrupted_at(parts, 25 if name == "classification" else 40)
        run_to_end(whole)
        run_to_end(parts)
    assert log_of(parts) == log_of(whole)
    first, second = weights(parts), weights(whole)
    assert all(torch.equal(first[key], second[key]) for key in second)


def test_references_are_computed_once(tmp_path: Path) -> None:
    run = preference_run(tmp_path, "dpo", eval_every=None)
    interrupted_at(run, 30)
    stored = (run.data / "reference.npy").read_bytes()
    run_to_end(run)
    assert (run.data / "reference.npy").read_bytes() == stored


def test_a_lost_reference_is_an_error_once_the_model_has_changed(tmp_path: Path) -> None:
    run = preference_run(tmp_path, "dpo", save_every=1)
    interrupted_at(run, 45)
    assert len(log_of(run)) >= 1
    content = bytearray((run.data / "reference.npy").read_bytes())
    content[-1] ^= 1
    (run.data / "reference.npy").write_bytes(bytes(content))
    with pytest.raises(CannotTrain, match="submit the job again"):
        run_to_end(run)


@pytest.mark.parametrize("checks", [3, 7])
def test_an_interruption_keeps_what_is_known_of_the_reference(tmp_path: Path, checks: int) -> None:
    """While own completions are scored, and while mismatches are."""
    run = preference_run(tmp_path, "kto", certificate=False)
    interrupted_at(run, checks)
    known = np.load(run.data / "reference.npy")
    assert 0 < np.isnan(known).sum() < known.size
    assert (np.isnan(known[:, 0]).sum() == 0) == (checks > 5)
    run_to_end(run)
    assert not np.isnan(np.load(run.data / "reference.npy")).any()


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "strategy"), [
    ("dpo", "ddp"), ("kto", "fsdp"), ("orpo", "ddp"), ("reward", "fsdp"), ("classification", "ddp"),
])  # fmt: skip
def test_several_ranks_train_as_one(tmp_path: Path, name: OtherObjectiveName, strategy: Strategy) -> None:
    alone = finished(preference_run(tmp_path / "alone", name))
    together = with_ranks(preference_run(tmp_path / "together", name), [0.6, 0.4], strategy)
    trains_alike(finished(together), alone)
    if name != "classification":
        assert raw_log(together)[-1]["rewards"]["margin"] == pytest.approx(
            raw_log(alone)[-1]["rewards"]["margin"], rel=1e-3
        )


def test_a_job_goes_on_in_another_precision(tmp_path: Path) -> None:
    """As on another device: the reference of the first attempt is used."""
    run = preference_run(tmp_path, "dpo", save_every=1, certificate=False)
    interrupted_at(run, 30)
    assert len(log_of(run)) >= 1
    assignment = run.assignment()
    plan = assignment.plan.model_copy(update={"precision": "bf16"})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))
    assert run_to_end(run).steps == 10


def test_a_reference_that_is_not_a_number_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Replica.scores
    monkeypatch.setattr(Replica, "scores", lambda self, batch: honest(self, batch) * float("nan"))
    with pytest.raises(CannotTrain, match="infinite or not a number"):
        run_to_end(preference_run(tmp_path, "dpo"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        ("opt", {"dropout": 0.5, "layerdrop": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5}),
    ],
)
def test_dropout_that_a_layer_reads_from_the_configuration_is_turned_off(
    family: str, changes: dict[str, float]
) -> None:
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model, ids = make_any(config).train(), torch.randint(5, 50, (2, 12))

    def logits() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids).logits
        return found

    assert not torch.equal(logits(), logits())
    assert turn_dropout_off(model)
    assert torch.equal(logits(), logits())
    assert not turn_dropout_off(model)
    restore_dropout(model)
    assert {name: getattr(model.config, name) for name in changes} == changes
    assert "accrue" not in str(model.config.to_dict())


@pytest.mark.parametrize("family", ["phimoe", "mixtral", "minimax"])
def test_turning_jitter_off_changes_nothing_in_evaluation(family: str) -> None:
    """PhiMoE's `router_jitter_noise` is a threshold of its router."""
    torch.manual_seed(1)
    config = small_config(family)
    config.router_jitter_noise = 0.2
    model, ids = make_any(config).eval(), torch.randint(5, 50, (2, 12))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        turn_dropout_off(model)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_model_without_dropout_is_left_as_it_is() -> None:
    """GPT-2's configuration also has the dropout of a head that a language model does not have."""
    config = small_config("gpt2")
    config.summary_first_dropout = 0.1
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = make_any(config)
    assert model.config.summary_first_dropout > 0
    assert not turn_dropout_off(model)
    assert model.config.summary_first_dropout > 0


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, 3.0)])
def test_the_losses_of_targets_take_one_tensor_of_logits(
    monkeypatch: pytest.MonkeyPatch, scale: float, cap: float | None
) -> None:
    torch.manual_seed(0)
    hidden, targets = torch.randn(7, 16), torch.randint(0, 1000, (7,))
    monkeypatch.setattr(Head, "rows", 4)
    head = Head(torch.nn.Linear(16, 1000, bias=False), scale, cap)
    logits = hidden @ head.weight.T * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    large: set[int] = set()

    class Watching(TorchDispatchMode):
        """Notes where tensors of the size of a chunk's logits are."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.numel() == 4 * 1000:
                large.add(found.data_ptr())
            return found

    with Watching():
        each = _of_each_state(hidden[:4], targets[:4], head)
    assert len(large) == 1
    whole = _of_each_state(hidden, targets, head)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(whole, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(each, whole[:4])
