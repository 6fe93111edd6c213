"""The simulation compared with what an H200 has measured (tests/gpu, `memory`)."""

import json
from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.planning.estimate import ByProfile
from tests.gpu.acceptance import RESULTS
from tests.gpu.kernels import RECIPES
from workers.profiling.profile import make_profile

MEASURED: dict[str, Any] = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())["parts"]["memory"]


@pytest.mark.thorough
@pytest.mark.parametrize("case", RECIPES, ids=lambda case: case.name)
def test_memory_is_predicted_as_measured(case: Any) -> None:
    true = MEASURED["figures"][case.name]["true"]
    recipe = Recipe(
        device="cuda", expandable_segments=True, context_bytes=MEASURED["figures"]["context_bytes"],
        **case.options,
    )  # fmt: skip
    profile = make_profile(case.config, recipe, case.sequence)
    predicted = ByProfile(profile.curve, recipe, "simulated").memory(case.rows)
    assert predicted.peak_allocated_bytes == pytest.approx(true["allocated"], rel=0.001)
    assert predicted.peak_reserved_bytes == pytest.approx(true["reserved"], rel=0.01)
    assert predicted.peak_process_bytes == pytest.approx(true["process"], rel=0.01)
