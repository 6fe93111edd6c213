"""The worker's own plan for the devices that it uses."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.contract.preview import Lengths
from app.datasets import lengths
from app.planning.devices import GIB, Device
from app.planning.planner import PlannerEvidence
from app.storage.database import Database
from tests.harness.specs import make_spec
from workers import trainer_launcher

CPUS = tuple(Device(number, "CPU", 8 * GIB, "cpu") for number in range(2))
MEASURED = Lengths(
    examples=100, shortest=8, median=32, mean=32, longest=64, over_max_length=0, without_targets=0, kept=32,
    target_share=1, histogram=(),
)  # fmt: skip


@pytest.mark.parametrize(("count", "expected"), [(1, 512), (2, 64)])
def test_measured_lengths_are_used_if_the_ranks_own_step_was_simulated_with_them(
    database: Database, monkeypatch: pytest.MonkeyPatch, count: int, expected: int
) -> None:
    """One device's step was simulated for `max_length` alone, that of two ranks for the measured length."""

    def estimates(recipe: Recipe, sequence: int) -> Any:
        simulated = sequence == (512 if recipe.direct_sums else 64)
        return SimpleNamespace(source="simulated" if simulated else "formula")

    spec = make_spec()
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 512})})
    monkeypatch.setattr(lengths, "find", lambda *of: MEASURED)
    with database.reading() as session:
        found = trainer_launcher._sample_length(session, spec, CPUS[:count], PlannerEvidence(estimates))
    assert found == expected
