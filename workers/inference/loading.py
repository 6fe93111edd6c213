"""Loads a model for answering: its weights, its tokenizer, and the adapters that share it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GenerationConfig

from app.contract.model_reference import ModelLayer, ModelReference
from workers.inference.sampling import SamplingDefaults
from workers.training.exceptions import CannotTrain
from workers.training.models.base_model import check_config, load_tokenizer, prepare_files, read_model
from workers.training.models.model_parts import embeddings_of, positions_of
from workers.training.models.trained_weights import (
    Layer,
    check_alike,
    check_layers,
    saved_adapter,
    with_layers,
)

NOT_LOADED = (
    OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, SafetensorError,
    ArithmeticError, AssertionError, StrictDataclassError, RuntimeError, ImportError,
)  # fmt: skip
"""What loading files that are damaged, or belong to something else, may raise."""

_WITHOUT_LIMIT = 2**17
"""The context length assumed for models that name none, such as RWKV."""


MAX_ADAPTERS = 16
"""The adapters of one model that stay loaded."""


class NotShared(Exception):
    """Adapters that cannot share the model with others: they have to be merged into weights of their own."""


@dataclass(eq=False)
class Loaded:
    """A model that can answer, in evaluation mode.

    Args:
        model: as transformers loads it; adapters are added to its layers in place.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    defaults: SamplingDefaults
    ends: frozenset[int] = frozenset()
    """The tokens that end every answer."""
    _adapted: Any = None
    """peft's view of the model, once it has adapters."""
    _names: dict[str, str] = field(default_factory=dict)
    """peft's names of adapters, by those of their layers."""
    _added: int = 0
    """How many were added so far."""

    @property
    def context(self) -> int:
        """The tokens that a prompt and its answer may have together."""
        return positions_of(self.model) or _WITHOUT_LIMIT

    @property
    def vocabulary(self) -> int:
        """How many tokens the model can read: a tokenizer may have more than the model has embeddings."""
        known, embeddings = len(self.tokenizer), embeddings_of(self.model)
        return known if embeddings is None else min(known, embeddings)

    def add_adapter(self, layer: ModelLayer, path: Path, in_use: Collection[str | None] = ()) -> None:
        """Adds adapters, which answer when they are `active`. If too many are loaded, the least
        recently used ones are unloaded.

        Args:
            in_use: the layers of adapters that must stay.

        Raises:
            CannotTrain: they have changed, or do not belong to the model.
            NotShared: they adapt parameters outside of linear modules, which cannot have several adapters.
        """
        if layer.name in self._names:
            self._names[layer.name] = self._names.pop(layer.name)  # the newest comes last
            return
        self._unload_beyond(MAX_ADAPTERS - 1, in_use)
        check_layers([(layer, path)])
        saved = saved_adapter(layer, path)
        self._added += 1
        name = f"adapter{self._added}"
        config = _adapter_config(self.model, layer, saved)
        if self._adapted is None:
            from peft import PeftModel

            self._adapted = PeftModel(self.model, config, adapter_name=name)
        else:
            self._adapted.add_adapter(name, config)
        _copy(self._adapted, name, saved, layer)
        self._adapted.requires_grad_(False)
        self._adapted.eval()
        self._names[layer.name] = name

    def _unload_beyond(self, most: int, in_use: Collection[str | None]) -> None:
        unused = [layer for layer in self._names if layer not in in_use]
        for layer in unused[: max(0, len(self._names) - most)]:
            self._adapted.delete_adapter(self._names.pop(layer))

    @contextmanager
    def active(self, adapter: str | None) -> Iterator[None]:
        """A block in which the model answers with adapters, by their layer's name, or without any."""
        if self._adapted is None:
            yield
        elif adapter is None:
            with self._adapted.disable_adapter():
                yield
        else:
            self._adapted.set_adapter(self._names[adapter])
            yield


def load(
    reference: ModelReference, path: str, layers: list[Layer], folder: Path, device: torch.device
) -> Loaded:
    """Loads a model with what earlier jobs trained on it, except for adapters that others share.

    Weights have the precision in which they are stored.

    Args:
        path: the model's folder, or its name on the hub, of which the files are on this machine already.
        folder: an empty folder for the staged files.

    Raises:
        CannotTrain: the files have changed, cannot be read, or contain no model.
    """
    try:
        staged = prepare_files(reference, path, folder / "base")
        check_layers(layers)
        check_config(staged)
        tokenizer = load_tokenizer(staged)
        model, _ = read_model(reference.name, staged, attention="sdpa", dtype="auto")
    except NOT_LOADED as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CannotTrain(
            "model_not_loaded",
            f"the model {reference.name} could not be loaded ({type(error).__name__}): check that its files "
            "are complete",
        ) from error
    model = with_layers(model, layers)
    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = True
    ends = _ends(model, tokenizer)
    model.generation_config = GenerationConfig()  # its defaults would apply in addition to those of requests
    return Loaded(model.to(device), tokenizer, device, SamplingDefaults.of_folder(staged), ends)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of a sequence, and those of the model's generation_config.json."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [*(named if isinstance(named, list | tuple) else [named]), tokenizer.eos_token_id]
    return frozenset(int(token) for token in found if isinstance(token, int))


def _adapter_config(model: Any, layer: ModelLayer, saved: Mapping[str, torch.Tensor]) -> Any:
    """peft's configuration of saved adapters: they are added to exactly the layers with
    saved values."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    assert layer.lora is not None
    targets = sorted({_layer_of(name) for name in saved})
    modules = dict(model.named_modules())
    kinds = [modules.get(_plain_or_adapted(name, modules)) for name in targets]
    if not all(isinstance(kind, torch.nn.Linear | Conv1D) for kind in kinds):
        raise NotShared(layer.name)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=layer.lora.r,
        lora_alpha=layer.lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(kind, Conv1D) for kind in kinds),
        inference_mode=True,
    )


_PREFIX = "base_model.model."


def _layer_of(name: str) -> str:
    """The name of the layer that a value of an adapter belongs to."""
    return name.removeprefix(_PREFIX).partition(".lora_")[0]


def _plain_or_adapted(name: str, modules: Mapping[str, Any]) -> str:
    """Where a layer is, if other adapters may have been added to it before."""
    below = f"{name}.base_layer"
    return below if below in modules else name


def _copy(adapted: Any, name: str, saved: Mapping[str, torch.Tensor], layer: ModelLayer) -> None:
    """Gives new adapters their saved values.

    Raises:
        CannotTrain: names or shapes differ.
    """
    own = {
        parameter_name.replace(f".{name}.", "."): parameter
        for parameter_name, parameter in adapted.named_parameters()
        if ".lora_" in parameter_name and f".{name}." in parameter_name
    }
    check_alike(saved, own, layer)
    with torch.no_grad():
        for parameter_name, weight in saved.items():
            own[parameter_name].copy_(weight)
