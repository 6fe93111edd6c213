"""Preference objectives on a GPU: the same gradient in any split, and that of a CPU in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from app.contract.objective import OtherObjectiveName
from tests.harness.preferences import (
    OBJECTIVES,
    difference,
    gradients_of,
    make_model,
    objective_spec,
    preference_samples,
    scores_of,
)

TOLERANCE = {None: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_split_changes_the_gradient(tmp_path: Path, name: OtherObjectiveName, dtype: Any) -> None:
    samples = preference_samples(tmp_path, objective_spec(name), weighted=True)
    everything = list(range(len(samples)))
    model = make_model("llama", torch.float32, scores=scores_of(name))
    exactly = make_model("llama", scores=scores_of(name))
    exactly.load_state_dict(model.state_dict())
    _, exact, _ = gradients_of(exactly, samples, [everything])
    model.cuda()
    with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        _, whole, _ = gradients_of(model, samples, [everything], chunk=64)
        _, parts, _ = gradients_of(model, samples, [[each] for each in everything], chunk=16)
    assert difference(parts, whole) < TOLERANCE[dtype]
    assert difference({key: each.cpu() for key, each in whole.items()}, exact) < TOLERANCE[dtype]
