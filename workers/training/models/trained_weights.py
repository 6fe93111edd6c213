"""Loads what earlier jobs trained on a model: whole weights from a checkpoint, and adapters."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from app.contract.assignment import Assignment
from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import ModelLayer
from workers.training.exceptions import CannotTrain
from workers.training.models.adapters import check_mergeable, with_adapters
from workers.training.models.score_head import LANGUAGE_HEADS, NAME, score_layer_of

_ADAPTERS, _CHECKPOINT = "adapter_model.safetensors", "model.safetensors"


Layer = tuple[ModelLayer, Path]
"""A layer, and its folder."""


def layers_of(assignment: Assignment) -> list[Layer]:
    """The layers of a job's model, in the order of loading."""
    return [
        (layer, Path(path))
        for layer, path in zip(assignment.spec.model.layers, assignment.layer_paths, strict=True)
    ]


def layers_below(assignment: Assignment) -> list[Layer]:
    """The layers except for the adapters that the job goes on training."""
    spec = assignment.spec
    continued = spec.model.continued_adapters(adapters=spec.method.lora is not None)
    return [each for each in layers_of(assignment) if each[0] is not continued]


def check_layers(layers: Iterable[Layer]) -> None:
    """Checks that the layers' files are those that the job was submitted with.

    Raises:
        CannotTrain: they have been deleted, or have changed.
    """
    for layer, path in layers:
        try:
            is_same = path.is_dir() and fingerprint_of_files(path) == layer.fingerprint
        except OSError:
            is_same = False
        if not is_same:
            raise CannotTrain(
                "model_changed",
                f"the files of {layer.name} have been deleted or changed since the job was submitted: submit "
                "a new job, from a model that exists",
            )


def with_layers(model: Any, layers: Iterable[Layer]) -> Any:
    """The model with what earlier jobs trained on it. Adapters are merged into the weights below them.

    Raises:
        CannotTrain: the layers do not belong to the model.
    """
    for layer, path in layers:
        if layer.lora is None:
            _copy(weights_of(path / _CHECKPOINT, layer), model, layer)
        else:
            adapted = with_saved_adapters(model, (layer, path))
            check_mergeable(adapted)
            model = adapted.merge_and_unload()
            model.requires_grad_(True)  # which peft has set to false
    return model


def with_saved_adapters(model: Any, layer: Layer) -> Any:
    """The model with a layer's adapters, not merged.

    Raises:
        CannotTrain: they do not belong to the model.
    """
    own, path = layer
    assert own.lora is not None, "a layer of adapters"
    adapted = with_adapters(model, own.lora, seed=0, saved=_adapter_names(path, own))
    _load(adapted, own, path)
    return adapted


def names_of_continued(assignment: Assignment) -> frozenset[str]:
    """The names of the values of the adapters that the job goes on training; empty if it trains new ones."""
    spec = assignment.spec
    layer = spec.model.continued_adapters(adapters=spec.method.lora is not None)
    return frozenset() if layer is None else _adapter_names(Path(assignment.layer_paths[-1]), layer)


def continue_adapters(model: Any, assignment: Assignment) -> None:
    """Gives the job's adapters the values that the earlier job has left.

    Raises:
        CannotTrain: they do not belong to the model.
    """
    spec = assignment.spec
    layer = spec.model.continued_adapters(adapters=spec.method.lora is not None)
    if layer is not None:
        _load(model, layer, Path(assignment.layer_paths[-1]))


def _load(model: Any, layer: ModelLayer, path: Path) -> None:
    """Loads adapters into a model that has them already."""
    if (path / _CHECKPOINT).exists():
        _copy(weights_of(path / _CHECKPOINT, layer), model, layer)
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved = saved_adapter(layer, path)
    own: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved, expected = _without_new_head(saved, own, model)
    check_alike(saved, expected, layer)
    set_peft_model_state_dict(model, {**own, **saved})


def _adapter_names(path: Path, layer: ModelLayer) -> frozenset[str]:
    """The names of saved adapters' values."""
    file = path / _CHECKPOINT
    return frozenset(weights_of(file if file.exists() else path / _ADAPTERS, layer))


def saved_adapter(layer: ModelLayer, path: Path) -> dict[str, Tensor]:
    """The values of a layer's adapters, named as peft saves them.

    Raises:
        CannotTrain: they cannot be read.
    """
    file = path / _CHECKPOINT
    if not file.exists():
        saved = weights_of(path / _ADAPTERS, layer)
        return {name: weight for name, weight in saved.items() if not _is_of_base_model(name)}
    return {name.replace(".default.", "."): weight for name, weight in weights_of(file, layer).items()}


def _is_of_base_model(name: str) -> bool:
    """Whether a value in a file of adapters is a weight below them: earlier versions saved those of adapted
    heads and embeddings."""
    return ".base_layer." in name and ".lora_" not in name


def weights_of(path: Path, layer: ModelLayer) -> dict[str, Tensor]:
    """The weights in a layer's file.

    Raises:
        CannotTrain: they cannot be read.
    """
    try:
        if path.is_symlink():
            raise OSError(0, "a link")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CannotTrain(
            "model_not_loaded", f"the weights of {layer.name} could not be read ({type(error).__name__})"
        ) from None


def _without_new_head(
    saved: dict[str, Tensor], own: dict[str, Tensor], model: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Saved weights and those of a model, without the heads, if the model scores sequences and the saved
    weights are those of a language model: then the head is new."""
    heads = [name for name in own if f".{NAME}." in f".{name}"]
    if score_layer_of(model) is None or any(name in saved for name in heads):
        return saved, own
    return (
        {name: weight for name, weight in saved.items() if name not in LANGUAGE_HEADS},
        {name: weight for name, weight in own.items() if name not in heads},
    )


def _copy(saved: dict[str, Tensor], model: Any, layer: ModelLayer) -> None:
    parameters = dict(model.named_parameters())
    saved, _ = _without_new_head(saved, parameters, model)
    check_alike(saved, {name: parameters[name] for name in saved if name in parameters}, layer)
    with torch.no_grad():
        for name, weight in saved.items():
            parameters[name].copy_(weight)


def check_alike(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], layer: ModelLayer) -> None:
    """Checks that saved weights and those of a model have the same names and shapes.

    Raises:
        CannotTrain: they have not.
    """
    shapes = {name: tuple(weight.shape) for name, weight in saved.items()}
    if not shapes or shapes != {name: tuple(weight.shape) for name, weight in own.items()}:
        raise CannotTrain(
            "model_not_loaded",
            f"the weights of {layer.name} do not match the model that it was trained on: names or shapes "
            "differ, so files have been replaced. Start from another model",
        )
