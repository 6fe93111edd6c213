"""Nothing is read from the device before a window ends, neither by Accrue's code nor by transformers'.

A read is what makes a GPU's host wait: a tensor's value as a Python number or its copy to the host. On a
CPU, the same operations are caught, although they do not wait.
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.contract.plan import FixedSize
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training import accumulate
from workers.training.replica import Replica
from workers.training.reporting.trackers import Trackers
from workers.training.start import start

ROOT = Path(__file__).parents[2]
READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
}


class HostReads(TorchDispatchMode):
    """Counts reads by the innermost frame that is ours or transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function._schema.name in READS:
            self.found[_origin()] += 1
        return function(*arguments, **(named or {}))


def _origin() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "workers"):
            return f"accrue {path.name}:{frame.name}"
        if "transformers" in path.parts or "peft" in path.parts:
            return f"transformers {path.name}:{frame.name}"
    return "elsewhere"


def reads_of_a_window(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """Reads between a window's opening and its closing, and its micro-batches."""
    assignment = run.assignment()
    monkeypatch.setattr(torch.Tensor, "tolist", _noted(torch.Tensor.tolist))
    monkeypatch.setattr(torch.Tensor, "cpu", _noted(torch.Tensor.cpu))
    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False)
        window = training.next_window()
        [groups] = accumulate.divide(training, window)
        batches = [training.loader.fetch(window[group].tolist()) for group in groups]
        training.replica.window.open(training.loader.samples.denominator(window), len(groups))
        with HostReads() as reads:
            CAUGHT.clear()
            for number, batch in enumerate(batches):
                training.replica.add(batch)
                if number == 0:
                    training.replica.window.record_first_norm()
        training.replica.window.abandon()
        training.loader.close()
    return reads.found + CAUGHT, len(groups)


CAUGHT: Counter[str] = Counter()


def _noted(honest: Any) -> Any:
    def noted(self: torch.Tensor, *arguments: Any) -> Any:
        CAUGHT[_origin()] += 1
        return honest(self, *arguments)

    return noted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"label_smoothing": 0.1},
        {"clip_mode": "each_micro_batch"},
        {"gradient_checkpointing": True},
        {"log_micro_losses": True, "log_gradients": True},
        {"data": small_data(packing=True)},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_our_code_reads_nothing_from_the_device_per_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    spec = make_spec(**{"data": small_data(), "max_steps": 2, **changes})
    found, count = reads_of_a_window(
        create_run(tmp_path / "run", spec, rule=FixedSize(samples=4)), monkeypatch
    )
    assert count == 4
    theirs = {origin: reads / count for origin, reads in found.items() if not origin.startswith("accrue")}
    print(f"reads per micro-step outside of our frames: {theirs or 'none'}")
    assert [origin for origin in found if origin.startswith("accrue")] == []
    assert theirs == {}


def test_the_test_s_counter_detects_device_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Replica.forward

    def reading(self: Replica, batch: Any) -> Any:
        forward = honest(self, batch)
        assert forward.loss_sum.item() > 0
        return forward

    monkeypatch.setattr(Replica, "forward", reading)
    run = create_run(tmp_path / "run", make_spec(data=small_data()), rule=FixedSize(samples=4))
    found, count = reads_of_a_window(run, monkeypatch)
    assert sum(found.values()) >= count


def test_a_whole_window_reads_once(tmp_path: Path) -> None:
    """From its opening to its end, the optimizer's step included: one read, which decides."""
    run = create_run(tmp_path / "run", make_spec(data=small_data()), rule=FixedSize(samples=4))
    assignment, reads = run.assignment(), 0
    honest = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        nonlocal reads
        reads += 1
        return honest(self)

    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False)
        window = training.next_window()
        denominator = training.loader.samples.denominator(window)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counted)
            with HostReads() as found:
                accumulate.train_window(training, window, denominator)
        training.loader.close()
    assert reads == 1
    assert [origin for origin in found.found if origin.startswith("accrue")] == []
