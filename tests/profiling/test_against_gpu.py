"""The simulation compared with what an H200 and an H100 have measured (tests/gpu, `memory`)."""

import json
from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.planning.estimate import ByProfile
from tests.gpu.acceptance import RESULTS
from tests.gpu.kernels import RECIPES
from workers.profiling import simulate
from workers.profiling.profile import make_profile
from workers.training.models.precision import autocast

MEASURED: list[dict[str, Any]] = [
    json.loads((RESULTS / f"gpu-{name}.json").read_text())["parts"]["memory"]["figures"]
    for name in ("nvidia-h200", "nvidia-h100-80gb-hbm3")
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", RECIPES, ids=lambda case: case.name)
def test_memory_is_predicted_as_measured(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this was measured, trainers kept autocast's copies with gradient checkpointing, too."""
    monkeypatch.setattr(simulate, "autocast", lambda precision, device, **_: autocast(precision, device))
    common = Recipe(device="cuda", expandable_segments=True, **case.options)
    profile = make_profile(case.config, common, case.sequence)
    for figures in MEASURED:
        true = figures[case.name]["true"]
        recipe = common.model_copy(update={"context_bytes": figures["context_bytes"]})
        predicted = ByProfile(profile.curve, recipe, "simulated").memory(case.rows)
        assert predicted.peak_allocated_bytes == pytest.approx(true["allocated"], rel=0.001)
        assert predicted.peak_reserved_bytes == pytest.approx(true["reserved"], rel=0.01)
        assert predicted.peak_process_bytes == pytest.approx(true["process"], rel=0.01)
