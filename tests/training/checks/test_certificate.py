"""The gradient check finds models that compute a sample differently beside other samples."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from app.contract.objective import OtherObjectiveName
from app.contract.plan import FixedSize, MicroBatchRule, TokenBudget
from tests.harness.preferences import preference_run
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end, scale_losses
from workers.run_directory import RunDirectory
from workers.training.exceptions import CannotTrain


def depend_on_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each layer's result depend on the number of tokens in the micro-batch."""
    forward = GPT2Block.forward

    def mixing(self: GPT2Block, hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return forward(self, hidden * (1.0 + 1e-3 * hidden.shape[:2].numel()), *arguments, **named)

    monkeypatch.setattr(GPT2Block, "forward", mixing)


def test_a_model_that_mixes_the_samples_of_a_micro_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depend_on_micro_batch(monkeypatch)
    spec = make_spec(data=small_data(), max_steps=3, certificate=True)
    with pytest.raises(CannotTrain, match="equivalence_check: false"):
        run_to_end(create_run(tmp_path / "run", spec, rule=FixedSize(samples=8)))


def test_a_model_that_mixes_samples_is_refused_even_if_the_first_window_keeps_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its micro-batches holds one sample, and later ones may hold two."""
    depend_on_micro_batch(monkeypatch)
    spec = make_spec(data=small_data(max_length=4), max_steps=3, certificate=True)
    with pytest.raises(CannotTrain, match="equivalence_check: false"):
        run_to_end(create_run(tmp_path / "run", spec, rule=TokenBudget(tokens=4), most_tokens=8))


@pytest.mark.parametrize(
    ("rule", "most_tokens"),
    [
        pytest.param(FixedSize(samples=1), None, id="one sample by request"),
        pytest.param(TokenBudget(tokens=4), 7, id="two are predicted not to fit"),
        pytest.param(TokenBudget(tokens=4), 8, id="two run out of memory"),
    ],
)
def test_the_gradient_check_joins_no_samples_if_micro_batches_hold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: MicroBatchRule, most_tokens: int | None
) -> None:
    def failing(batch: Any) -> float:
        if len(batch.lengths) == 1:
            return 1.0
        raise torch.OutOfMemoryError("injected")

    scale_losses(monkeypatch, failing)
    spec = make_spec(data=small_data(max_length=4), max_steps=3, certificate=True)
    run = create_run(tmp_path / "run", spec, rule=rule, most_tokens=most_tokens)
    assert run_to_end(run).steps == 3
    assert len(events_of_kind(run, "certificate")) == 1
    assert not events_of_kind(run, "out_of_memory")


def _pairs(
    folder: Path,
    equal: Sequence[bool],
    name: OtherObjectiveName,
    weights: Sequence[float] | None = None,
    **changes: Any,
) -> RunDirectory:
    """A run on pairs, some of which have the same answer twice."""
    run = preference_run(folder, name, **changes)
    assignment = run.assignment()
    source = Path(assignment.data_file)
    rows = [json.loads(line) for line in source.read_text().splitlines()][: len(equal)]
    for row, same in zip(rows, equal, strict=True):
        row["rejected"] = row["chosen"] if same else row["rejected"]
    for row, weight in zip(rows, weights or [], strict=False):
        row["weight"] = weight
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    data = assignment.spec.data.model_copy(
        update={"sha256": digest, "examples": len(rows), "validation": None}
    )
    spec = assignment.spec.model_copy(update={"data": data})
    run.write_assignment(assignment.model_copy(update={"spec": spec}))
    return run


@pytest.mark.parametrize("name", ["dpo", "simpo", "reward"])
@pytest.mark.parametrize("different", [1, 2, 20])
def test_pairs_of_equal_answers_do_not_fail_the_gradient_check(
    tmp_path: Path, name: OtherObjectiveName, different: int
) -> None:
    equal = [number >= different for number in range(40)]
    run = _pairs(tmp_path, equal, name, effective_batch_size=8, max_steps=3)
    outcome = run_to_end(run)
    assert outcome.equivalence_error is not None
    assert outcome.equivalence_error < 1e-5
    [data] = events_of_kind(run, "data")
    assert f"{40 - different} pairs whose chosen and rejected answers are the same" in data["message"]


@pytest.mark.parametrize("name", ["dpo", "simpo", "reward"])
def test_data_without_any_different_answers_is_refused(tmp_path: Path, name: OtherObjectiveName) -> None:
    with pytest.raises(CannotTrain, match="the same in every pair"):
        run_to_end(_pairs(tmp_path, [True] * 40, name))


def test_orpo_also_learns_the_chosen_answers_of_equal_pairs(tmp_path: Path) -> None:
    assert run_to_end(_pairs(tmp_path, [True] * 40, "orpo", max_steps=2)).steps == 2


def test_pairs_without_weight_do_not_count_as_different(tmp_path: Path) -> None:
    weights = [float(number % 3 > 0) for number in range(40)]
    equal = [weight > 0 and number != 31 for number, weight in enumerate(weights)]
    outcome = run_to_end(_pairs(tmp_path, equal, "dpo", weights, effective_batch_size=8, max_steps=3))
    assert outcome.equivalence_error is not None
