"""The gradient check finds models that compute a sample differently beside other samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from app.contract.plan import FixedSize, MicroBatchRule, TokenBudget
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end, scale_losses
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
