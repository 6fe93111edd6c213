from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workers.training import checkpoint
from workers.training.checkpoint import AllDamaged, TrainingState


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_at(tmp_path: Path, *steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    for number in range(1, max(steps) + 1):
        step(model, optimizer)
        if number in steps:
            checkpoint.save(tmp_path, TrainingState(step=number, consumed=number, loss=0.1), model, optimizer)
    return model, optimizer


def test_a_checkpoint_restores_weights_moments_and_state(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 3)
    other, its_optimizer = trained(seed=1)
    state, damaged = checkpoint.restore(tmp_path, other, its_optimizer)
    assert state == TrainingState(step=3, consumed=3, loss=0.1)
    assert damaged == []
    assert torch.equal(model.weight, other.weight)
    step(model, optimizer)
    step(other, its_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.restore(tmp_path / "none", *trained()) == (None, [])


def test_two_are_kept(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2, 3, 4)
    assert [path.name[:13] for path in checkpoint.newest_first(tmp_path)] == [
        "step-00000004",
        "step-00000003",
    ]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    saved_at(tmp_path, 1, 2)
    path = checkpoint.newest_first(tmp_path)[0] / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-5])
    else:
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    state, damaged = checkpoint.restore(tmp_path, *trained())
    assert state is not None
    assert state.step == 1
    assert [name[:13] for name in damaged] == ["step-00000002"]


def test_a_damaged_checkpoint_does_not_block_a_new_one_of_the_same_step(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 1, 2)
    (checkpoint.newest_first(tmp_path)[0] / "model.safetensors").write_bytes(b"")
    state = TrainingState(step=2, consumed=2)
    checkpoint.save(tmp_path, state, model, optimizer)
    assert checkpoint.restore(tmp_path, *trained()) == (state, [])


def test_where_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2)
    for path in checkpoint.newest_first(tmp_path):
        (path / "state.json").write_text("{}")
    with pytest.raises(AllDamaged):
        checkpoint.restore(tmp_path, *trained())


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    (tmp_path / ".step-00000002-0000-00000002.77").mkdir()
    state, damaged = checkpoint.restore(tmp_path, *trained())
    assert state is not None
    assert (state.step, damaged) == (1, [])


def test_the_same_place_with_something_learned_since_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 1)
    learned = TrainingState(step=1, consumed=1, loss=0.1, token_budget=77)
    path = checkpoint.save(tmp_path, learned, model, optimizer)
    assert checkpoint.save(tmp_path, learned, model, optimizer) == path
    assert checkpoint.restore(tmp_path, *trained())[0] == learned


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in range(1, 6):
        state = TrainingState(step=step)
        if step == 2:
            checkpoint.mark_as_best(tmp_path, state)
            assert checkpoint.best(tmp_path) is None  # marked, not written yet
        checkpoint.save(tmp_path, state, model, optimizer)
    assert [path.name[:13] for path in checkpoint.newest_first(tmp_path)] == [
        "step-00000005", "step-00000004", "step-00000002",
    ]  # fmt: skip
    kept = checkpoint.best(tmp_path)
    assert kept is not None
    assert kept.name.startswith("step-00000002")


def test_states_in_dictionaries_come_back(tmp_path: Path) -> None:
    """As bitsandbytes keeps its 8-bit states."""

    class Wrapping(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict["state"]

    model = nn.Linear(2, 2)
    optimizer = Wrapping(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": 3, "inner": {"state1": torch.ones(3, dtype=torch.uint8)}}
    checkpoint.save(tmp_path, TrainingState(step=1), model, optimizer)
    checkpoint.restore(tmp_path, model, optimizer)
    assert optimizer.loaded[0]["step"] == 3
    assert optimizer.loaded[0]["inner"]["state1"].tolist() == [1, 1, 1]


def test_nothing_in_it_can_run_code(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    suffixes = {file.suffix for file in checkpoint.newest_first(tmp_path)[0].iterdir()}
    assert suffixes == {".safetensors", ".json"}
