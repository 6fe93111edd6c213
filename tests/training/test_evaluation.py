"""What an evaluation computes from a micro-batch."""

from dataclasses import replace

import pytest
import torch

from tests.harness.small_models import make_model, make_window64
from workers.training.loss import TokenLoss


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_evaluation_counts_the_targets_that_are_most_likely(
    family: str, weighted: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.training.head.rows_of_chunk", lambda *_: 7)
    model = make_model(family, torch.float64).eval()
    loss = TokenLoss(model, smoothing=0.3, chunked=chunked)
    batch = make_window64().batch([3, 8, 21])
    weights = torch.linspace(0.0, 2.0, len(batch.targets)) if weighted else None
    batch = replace(batch, weights=weights)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.target_positions]
        found = loss(batch, evaluates=True)
    each = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    right = (logits.argmax(-1) == batch.targets).double()
    counts = 1.0 if weights is None else weights
    assert float(found.loss_sum) == pytest.approx(float((each * counts).sum()), rel=1e-9)
    assert float(found.correct) == pytest.approx(float((right * counts).sum()), rel=1e-9)
