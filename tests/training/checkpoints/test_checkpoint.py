import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.checkpoint import AllDamaged
from workers.training.checkpoints.disk_errors import full_disk_reported
from workers.training.checkpoints.state import (
    Evaluations,
    Fallbacks,
    LearnedBudget,
    Losses,
    Position,
    Progress,
    Ramp,
    RunState,
    SavedLossScale,
)
from workers.training.exceptions import CannotTrain
from workers.training.models.parameters import Parameters


def save(folder: Path, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path | None:
    return checkpoint.save(folder, state, checkpoint.collect(Parameters(model), optimizer))


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[RunState | None, list[str]]:
    return checkpoint.restore(folder, Parameters(model), optimizer)


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stand(number: int) -> RunState:
    """Where a run is after so many steps."""
    progress, losses = Progress(step=number), Losses(first=0.2, last=0.1, recent=[0.2, 0.1])
    return RunState(progress, Position(consumed=number), losses, noise=[[1.0, 2.0]])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_at(tmp_path: Path, *steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    for number in range(1, max(steps) + 1):
        step(model, optimizer)
        if number in steps:
            save(tmp_path, stand(number), model, optimizer)
    return model, optimizer


def test_a_checkpoint_restores_weights_moments_and_state(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 3)
    other, its_optimizer = trained(seed=1)
    state, damaged = restore(tmp_path, other, its_optimizer)
    assert state == stand(3)
    assert damaged == []
    assert torch.equal(model.weight, other.weight)
    step(model, optimizer)
    step(other, its_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_restored_states_do_not_depend_on_the_checkpoint_s_file(tmp_path: Path) -> None:
    """It is mapped while it is read; on NFS, a folder with a mapped file cannot be removed."""
    saved_at(tmp_path, 3)
    kept = trained(seed=1)
    restore(tmp_path, *kept)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_restore_returns_none_without_a_checkpoint(tmp_path: Path) -> None:
    assert restore(tmp_path / "none", *trained()) == (None, [])


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2, 3, 4)
    assert [path.name[:13] for path in checkpoint.newest_first(tmp_path)] == [
        "step-00000004",
        "step-00000003",
    ]


def test_a_step_that_is_saved_again_does_not_take_the_place_of_the_step_before(tmp_path: Path) -> None:
    """After the last evaluation, the last step is saved a second time."""
    model, optimizer = saved_at(tmp_path, 1, 2)
    again = stand(2)
    again.progress.micro_step += 1  # what a later save of the same step keeps differs
    save(tmp_path, again, model, optimizer)
    kept = [int(path.name.split("-")[1]) for path in checkpoint.newest_first(tmp_path)]
    assert kept == [2, 1]
    assert restore(tmp_path, *trained()) == (again, [])


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, file: str, damage: str) -> None:
    saved_at(tmp_path, 1, 2)
    path = checkpoint.newest_first(tmp_path)[0] / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-5])
    else:
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    state, damaged = restore(tmp_path, *trained())
    assert state is not None
    assert state.step == 1
    assert [name[:13] for name in damaged] == ["step-00000002"]


def test_a_damaged_checkpoint_does_not_block_a_new_one_of_the_same_step(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 1, 2)
    (checkpoint.newest_first(tmp_path)[0] / "model.safetensors").write_bytes(b"")
    state = stand(2)
    save(tmp_path, state, model, optimizer)
    assert restore(tmp_path, *trained()) == (state, [])


def test_restore_raises_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2)
    for path in checkpoint.newest_first(tmp_path):
        (path / "state.json").write_text("{}")
    with pytest.raises(AllDamaged):
        restore(tmp_path, *trained())


def test_an_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    (tmp_path / ".step-00000002-0000-00000002.77").mkdir()
    state, damaged = restore(tmp_path, *trained())
    assert state is not None
    assert (state.step, damaged) == (1, [])


def test_a_changed_state_at_the_same_position_is_a_new_checkpoint(tmp_path: Path) -> None:
    model, optimizer = saved_at(tmp_path, 1)
    learned = stand(1)
    learned.budgets[0].tokens = 77
    assert save(tmp_path, learned, model, optimizer) is not None
    assert save(tmp_path, learned, model, optimizer) is None
    assert restore(tmp_path, *trained())[0] == learned


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in range(1, 6):
        state = RunState(Progress(step=step))
        state.evaluations.best_step = min(step, 2)
        save(tmp_path, state, model, optimizer)
    assert [path.name[:13] for path in checkpoint.newest_first(tmp_path)] == [
        "step-00000005", "step-00000004", "step-00000002",
    ]  # fmt: skip
    kept = checkpoint.best(tmp_path)
    assert kept is not None
    assert kept.name.startswith("step-00000002")


def test_a_checkpoint_does_not_depend_on_the_order_of_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    save(tmp_path, stand(1), model, optimizer)
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    reordered = torch.optim.AdamW([*reversed(list(other.parameters()))], lr=0.1)
    restore(tmp_path, other, reordered)
    step(model, optimizer)
    step(other, reordered)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_checkpoint_of_version_1_is_read(tmp_path: Path) -> None:
    """Its state was flat, and the optimizer's keyed by the parameters' places."""
    model, optimizer = saved_at(tmp_path, 3)
    (path,) = checkpoint.newest_first(tmp_path)
    tensors = load_file(path / "optimizer.safetensors")
    save_file(
        {key.replace("weight:", "0."): tensor for key, tensor in tensors.items()},
        path / "optimizer.safetensors",
    )
    state = {
        "step": 3, "micro_step": 7, "skipped": 1, "skipped_in_a_row": 0, "epoch": 1, "consumed": 24,
        "trained_tokens": 99, "first_loss": 2.0, "loss": 1.5, "loss_ema": 1.6, "loss_scale": 1024.0,
        "loss_scale_good_windows": 3, "token_budget": 128, "failed_tokens": 256, "largest_done": 100,
        "windows_since_failure": 2, "checkpointing": True, "tuned": True, "batch": 16,
        "windows_since_growth": 4, "windows_in_epoch": 2, "recent_losses": [2.0, 1.5], "noise": [[1.0]],
        "own_logits": False, "padded": True, "equivalence_error": 1e-7, "eval_loss": 1.4, "evaluated_at": 2,
        "best_loss": 1.3, "best_step": 1, "gained_loss": 1.35, "evaluations_without_gain": 1,
        "stopped_early": False,
    }  # fmt: skip
    (path / "state.json").write_text(json.dumps({"state": state, "optimizer": {}, "updates": [None]}))
    seal(path)
    other, its_optimizer = trained(seed=1)
    found, _ = restore(tmp_path, other, its_optimizer)
    assert found == RunState(
        Progress(step=3, micro_step=7, skipped=1, trained_tokens=99),
        Position(epoch=1, consumed=24, windows_in_epoch=2),
        Losses(first=2.0, last=1.5, average=1.6, recent=[2.0, 1.5]),
        [LearnedBudget(128, 256, 100, 2, measured=True)],
        Ramp(batch=16, windows_since_growth=4),
        SavedLossScale(1024.0, 3),
        Fallbacks(checkpointing=True, own_logits=False, padded=True, equivalence_error=1e-7),
        Evaluations(1.4, 2, 1.3, 1, 1.35, 1),
        noise=[[1.0]],
    )
    step(model, optimizer)
    step(other, its_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_a_checkpoint_of_a_newer_version_is_refused_and_not_called_damaged(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    (path,) = checkpoint.newest_first(tmp_path)
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**content, "version": 99}))
    seal(path)
    with pytest.raises(CannotTrain, match="version 99"):
        restore(tmp_path, *trained())


def seal(path: Path) -> None:
    """Writes the manifest of a checkpoint's files as they are."""
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    (path / "manifest.json").write_text(json.dumps(digests))


def test_nested_optimizer_states_are_restored(tmp_path: Path) -> None:
    """As bitsandbytes keeps its 8-bit states."""

    class Wrapping(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict["state"]

    model = nn.Linear(2, 2)
    optimizer = Wrapping(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": 3, "inner": {"state1": torch.ones(3, dtype=torch.uint8)}}
    save(tmp_path, RunState(Progress(step=1)), model, optimizer)
    restore(tmp_path, model, optimizer)
    assert optimizer.loaded[0]["step"] == 3
    assert optimizer.loaded[0]["inner"]["state1"].tolist() == [1, 1, 1]


def test_checkpoint_files_contain_no_executable_code(tmp_path: Path) -> None:
    saved_at(tmp_path, 1)
    suffixes = {file.suffix for file in checkpoint.newest_first(tmp_path)[0].iterdir()}
    assert suffixes == {".safetensors", ".json"}


def test_a_checkpoint_of_version_2_is_read(tmp_path: Path) -> None:
    """It had the budget of one rank."""
    saved_at(tmp_path, 3)
    (path,) = checkpoint.newest_first(tmp_path)
    content = json.loads((path / "state.json").read_text())
    content["version"] = 2
    del content["state"]["budgets"]
    content["state"]["budget"] = {"tokens": 128, "failed_tokens": 256, "largest_done": 100}
    (path / "state.json").write_text(json.dumps(content))
    seal(path)
    found, _ = restore(tmp_path, *trained(seed=1))
    assert found is not None
    assert found.budgets == [LearnedBudget(128, 256, 100)]
    assert found.step == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_recognised_whichever_library_finds_it(code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)) as found, full_disk_reported():
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")
    assert found.value.errno == code
    with pytest.raises(SafetensorError), full_disk_reported():
        raise SafetensorError("Error while deserializing header: invalid JSON")
