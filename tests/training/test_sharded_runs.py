"""Whole runs with a model that is divided among ranks: the same result as on one device."""

from pathlib import Path

import pytest

from app.contract.spec import ValidationSpec
from tests.harness.runs import create_run, log_of, small_data, start_trainer, with_ranks
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, weight_difference
from workers.run_directory import RunDirectory

pytestmark = pytest.mark.thorough

SECONDS = 240


def finished(run: RunDirectory) -> RunDirectory:
    assert start_trainer(run).wait(SECONDS) == 0, run.log.read_text()[-3000:]
    return run


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_divided_model_trains_as_a_whole_one(tmp_path: Path, ranks: int) -> None:
    validation = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(data=small_data(validation=validation), certificate=True, eval_every=4)
    alone = finished(create_run(tmp_path / "alone", spec))
    together = finished(with_ranks(create_run(tmp_path / "together", spec), [1 / ranks] * ranks, "fsdp"))
    assert weight_difference(together, alone) <= 1e-5
    for one, other in zip(log_of(together), log_of(alone), strict=True):
        assert (one["step"], one["samples"], one["tokens"]) == (
            other["step"],
            other["samples"],
            other["tokens"],
        )
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    [certificate] = events_of_kind(together, "certificate")
    assert certificate["data"]["gradient_error"] <= 1e-5
    evaluated = [
        [event["data"]["loss"] for event in events_of_kind(run, "evaluation")] for run in (together, alone)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
