"""Several ranks on GPUs: with NCCL on a GPU each, or with gloo if they share one."""

from pathlib import Path

import pytest
import torch

from app.contract.spec import Spec, Strategy
from tests.harness.runs import create_run, log_of, small_data, with_ranks
from tests.harness.specs import make_schedule, make_spec
from tests.harness.training import events_of_kind, finished, weight_difference
from workers.run_directory import RunDirectory

SECONDS = 600.0
LIMIT = 4 * 2**30


def spec_of(**changes: object) -> Spec:
    return make_spec(
        data=small_data(), effective_batch_size=16, max_steps=10, save_every=4, certificate=True,
        schedule=make_schedule("constant"), **changes,
    )  # fmt: skip


def on_gpus(
    folder: Path, spec: Spec, ranks: int, strategy: Strategy = "ddp", attempt: int = 1
) -> RunDirectory:
    """A run planned for the GPUs that exist; ranks share them if there are fewer. Each rank has little
    memory."""
    run = with_ranks(create_run(folder, spec, attempt=attempt), [1 / ranks] * ranks, strategy)
    assignment = run.assignment()
    there = torch.cuda.device_count()
    own = tuple(
        rank.model_copy(update={"gpu_id": rank.rank % there, "memory_limit_bytes": LIMIT})
        for rank in assignment.plan.ranks
    )
    plan = assignment.plan.model_copy(update={"ranks": own, "device": "cuda", "threads": None})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))
    return run


STRATEGIES = [
    "ddp",
    pytest.param("fsdp", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one(tmp_path: Path, strategy: Strategy) -> None:
    alone = finished(on_gpus(tmp_path / "alone", spec_of(), 1))
    together = finished(on_gpus(tmp_path / "together", spec_of(), 2, strategy))
    assert weight_difference(together, alone) <= 1e-4
    for one, other in zip(log_of(together), log_of(alone), strict=True):
        assert (one["step"], one["samples"], one["tokens"]) == (
            other["step"],
            other["samples"],
            other["tokens"],
        )
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    [certificate] = events_of_kind(together, "certificate")
    assert certificate["data"]["gradient_error"] <= 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path, strategy: Strategy) -> None:
    alone = finished(on_gpus(tmp_path / "alone", spec_of(), 1))
    half = spec_of().model_copy(update={"max_steps": 5})
    run = finished(on_gpus(tmp_path / "run", half, 2, strategy))
    run = finished(on_gpus(tmp_path / "run", spec_of(), 1, attempt=2))
    assert weight_difference(run, alone) <= 1e-3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_out_of_memory_replays_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    alone = finished(on_gpus(tmp_path / "alone", spec_of(), 1))
    monkeypatch.setenv("ACCRUE_FAIL_POINTS", f"rank-{rank}.micro_batch:memory:4")
    run = finished(on_gpus(tmp_path / "run", spec_of(), 2))
    [event] = events_of_kind(run, "out_of_memory")
    assert event["data"]["rank"] == rank
    assert weight_difference(run, alone) <= 1e-4
