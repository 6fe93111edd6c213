"""Checkpoints: written whole or not at all, verified before use, never overwritten.

A checkpoint is a directory of safetensors and JSON, with the SHA-256 of each file in manifest.json.
Weights and the optimizer's state are kept by parameter name, so that neither depends on the order in which
an optimizer was given its parameters. It is written under a temporary name, synced, and renamed. It contains
no random state: every window is seeded from (seed, epoch, position), so a resume needs no generator's
state.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.contract.fail_points import fail_point
from workers.run_directory import sync, write_atomically
from workers.training.checkpoints.disk_errors import full_disk_reported
from workers.training.checkpoints.state import VERSION, RunState, from_json
from workers.training.models.parameters import Parameters
from workers.training.optimizer import parameter_names

KEPT = 2
"""How many checkpoints are kept: those of the two newest steps; the best one is kept as well."""

BEST = "best"
"""The file that holds the best checkpoint's name."""

_CONTENT = {"model.safetensors", "optimizer.safetensors", "state.json"}
"""The files of a checkpoint, besides its manifest."""


class AllDamaged(Exception):
    """Checkpoints exist, but all of them are damaged."""


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint, by parameter name."""

    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    """The optimizer's, as `parameter:state`."""
    numbers: dict[str, float | None]
    """States that are not tensors."""
    updates: list[int | None]


def collect(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Content:
    """What a checkpoint is to hold. Every rank must call it: sharded tensors are gathered, and copied."""
    states, numbers = _flat(optimizer, parameters)
    weights = {name: parameters.whole(name, own) for name, own in parameters.trained.items()}
    return Content(weights, states, numbers, _updates(optimizer))


def save(folder: Path, state: RunState, content: Content) -> Path | None:
    """Writes the checkpoint of a step and returns once it is on the disk. If the step has the lowest
    validation loss so far, the checkpoint is marked as the best.

    Returns:
        The checkpoint's path, or None if an identical one exists already.
    """
    target = folder / name_of(state)
    for again in range(1, 1000):
        if not target.exists() or not _is_whole(target):
            break
        if json.loads((target / "state.json").read_text())["state"] == state.to_json():
            return None
        target = (
            folder / f"{name_of(state)}-{again:03d}"
        )  # the same position, but the state has changed since
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{target.name}.{os.getpid()}"
    _clear(folder)
    shutil.rmtree(target, ignore_errors=True)
    try:
        with full_disk_reported():
            partial.mkdir()
            _write(partial, state, content)
    except (OSError, SafetensorError):
        _clear(folder)  # frees the space again if the disk is full
        raise
    fail_point("checkpoint.written")
    partial.rename(target)
    fail_point("checkpoint.renamed")
    sync(folder)
    mark_if_best(folder, state)
    _retire(folder)
    fail_point("checkpoint.retired")
    return target


def _write(folder: Path, state: RunState, content: Content) -> None:
    """Writes a checkpoint's files and their manifest, and flushes them to disk."""
    save_file(content.weights, folder / "model.safetensors")
    fail_point("checkpoint.weights")
    save_file(content.states, folder / "optimizer.safetensors")
    fail_point("checkpoint.optimizer")
    rest = {
        "version": VERSION,
        "state": state.to_json(),
        "optimizer": content.numbers,
        "updates": content.updates,
    }
    (folder / "state.json").write_text(json.dumps(rest))
    fail_point("checkpoint.state")
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor(2 * len(files)) as threads:  # the disk writes while digests are computed
        synced = [threads.submit(sync, file) for file in files]
        manifest = {
            file.name: digest for file, digest in zip(files, threads.map(_digest, files), strict=True)
        }
    for each in synced:
        each.result()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    fail_point("checkpoint.manifest")
    for path in (folder / "manifest.json", folder):
        sync(path)


def name_of(state: RunState) -> str:
    """The name of a state's checkpoint; later ones sort after earlier ones."""
    at = state.position
    return f"{_prefix(state.step)}{at.epoch:04d}-{at.consumed:08d}"


def _prefix(step: int) -> str:
    return f"step-{step:08d}-"


def restore(
    folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer
) -> tuple[RunState | None, list[str]]:
    """Loads the newest whole checkpoint into parameters and optimizer.

    Returns:
        The state, or None if there is no checkpoint yet; and the names of damaged checkpoints that were
        skipped.

    Raises:
        AllDamaged: checkpoints exist, but all are damaged.
        CannotTrain: a newer version of this program wrote it.
    """
    damaged: list[str] = []
    for path in newest_first(folder):
        if _is_whole(path):
            for name in damaged:
                _set_aside(folder / name)
            return _load(path, parameters, optimizer), damaged
        damaged.append(path.name)
    if damaged:
        raise AllDamaged(", ".join(damaged))
    return None, []


def _set_aside(path: Path) -> None:
    """Renames a damaged checkpoint, so that a new one can have its name."""
    kept = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(kept, ignore_errors=True)
    path.rename(kept)


def newest_first(folder: Path) -> list[Path]:
    """The finished checkpoints, newest first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.exists() else []


def newest_whole(folder: Path) -> Path | None:
    """The newest undamaged checkpoint, or None."""
    return next(filter(_is_whole, newest_first(folder)), None)


def _load(path: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> RunState:
    content = json.loads((path / "state.json").read_text())
    version = content.get("version", 1)
    found = from_json(content["state"], version)
    load_weights(path, parameters)
    # copies, since the optimizer keeps what it gets, and the file, which is mapped, will be deleted
    states = {name: own.clone() for name, own in load_file(path / "optimizer.safetensors").items()}
    flat = {**states, **content["optimizer"]}
    names = parameter_names(parameters, optimizer)
    whole = _unflat_by_index(flat) if version == 1 else _unflat(flat, names)
    state = {place: _parts(parameters, names[place], own) for place, own in whole.items()}
    groups = optimizer.state_dict()["param_groups"]
    for group, updates in zip(groups, content["updates"], strict=True):
        if updates is not None:
            group["step"] = updates
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return found


def _parts(parameters: Parameters, name: str, states: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's parts of a parameter's optimizer states."""
    return {
        state: parameters.part(name, value) if isinstance(value, Tensor) else value
        for state, value in states.items()
    }


def _flat(
    optimizer: torch.optim.Optimizer, parameters: Parameters
) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """The optimizer's state as `parameter:state`: tensors, and all values that are not tensors.

    A state that is a dict itself, as bitsandbytes' 8-bit ones are, is kept as `parameter:state/inner`.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float | None] = {}
    seen: set[int] = set()
    names = parameter_names(parameters, optimizer)
    for index, values in optimizer.state_dict()["state"].items():
        for state, value in values.items():
            key = f"{names[index]}:{state}"
            if isinstance(value, dict):
                tensors |= {f"{key}/{inner}": tensor.contiguous() for inner, tensor in value.items()}
            elif isinstance(value, Tensor):
                own = parameters.whole(names[index], value).contiguous()
                shared = own.data_ptr() in seen  # bitsandbytes has one table for all parameters
                tensors[key] = own.clone() if shared else own
                seen.add(own.data_ptr())
            else:
                scalars[key] = value
    return tensors, scalars


def _unflat(flat: Mapping[str, Any], names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Reverses `_flat`: the states by each parameter's index in this optimizer."""
    places = {name: place for place, name in enumerate(names)}
    found: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        name, _, state = key.rpartition(":")
        _put(found.setdefault(places[name], {}), state, value)
    return found


def _unflat_by_index(flat: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Reads the flat optimizer state of version 1, whose keys are `place.state`."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        place, _, state = key.partition(".")
        _put(found.setdefault(int(place), {}), state, value)
    return found


def _put(states: dict[str, Any], state: str, value: Any) -> None:
    outer, _, inner = state.partition("/")
    if inner:
        states.setdefault(outer, {})[inner] = value
    else:
        states[outer] = value


def _updates(optimizer: torch.optim.Optimizer) -> list[int | None]:
    """The number of updates of each group, which some optimizers (pytorch_optimizer's) count."""
    return [group.get("step") for group in optimizer.param_groups]


def _is_whole(path: Path) -> bool:
    try:
        if any(each.is_symlink() or not each.is_file() for each in path.iterdir()):
            return False  # a pipe could not be read to its end
        manifest = json.loads((path / "manifest.json").read_text())
        if set(manifest) != _CONTENT:
            return False
        with ThreadPoolExecutor(len(manifest)) as threads:
            digests = threads.map(_digest, [path / name for name in manifest])
        if list(digests) != list(manifest.values()):
            return False
        content = json.loads((path / "state.json").read_text())
        state = from_json(content["state"], content.get("version", 1))
        return path.name.startswith(_prefix(state.step))
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return False


def mark_if_best(folder: Path, state: RunState) -> None:
    """Marks the checkpoint of this state, which is on disk, as the best if its step has the lowest validation
    loss, in place of the previous best one."""
    if state.evaluations.best_step is not None and state.evaluations.best_step == state.step:
        write_atomically(folder / BEST, name_of(state))


def best(folder: Path) -> Path | None:
    """The undamaged checkpoint marked as best, or None. If several were saved at the marked position in the
    data, it is the newest of them."""
    mark = folder / BEST
    if not mark.exists():
        return None
    found = [path for path in newest_first(folder) if path.name.startswith(mark.read_text())]
    return next((path for path in found if _is_whole(path)), None)


def state_of(path: Path) -> RunState:
    """The state of the run when a checkpoint was written."""
    content = json.loads((path / "state.json").read_text())
    return from_json(content["state"], content.get("version", 1))


def load_weights(path: Path, parameters: Parameters) -> None:
    """Loads a checkpoint's weights, and nothing else."""
    weights = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, own in parameters.trained.items():
            own.copy_(parameters.part(name, weights[name]))


def _retire(folder: Path) -> None:
    best = (folder / BEST).read_text() if (folder / BEST).exists() else None
    for path in _superfluous(newest_first(folder)):
        if best is None or not path.name.startswith(best):
            hidden = path.with_name(f".{path.name}")  # on NFS, files that are open stay in it
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
    _clear(folder)


def _superfluous(newest_first: list[Path]) -> list[Path]:
    """The checkpoints that need not be kept. After an evaluation, a step is saved again: of each step, the
    newest is kept first."""
    of_steps: dict[str, Path] = {}
    for path in newest_first:
        of_steps.setdefault(path.name.split("-")[1], path)
    kept = list(of_steps.values())[:KEPT]
    kept += [path for path in newest_first if path not in kept][: KEPT - len(kept)]
    return [path for path in newest_first if path not in kept]


def _clear(folder: Path) -> None:
    """Removes unfinished and retired checkpoints."""
    for partial in folder.glob(".step-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
