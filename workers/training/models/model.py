"""Prepares a loaded model for training (adapters, frozen parameters, precision), and saves it."""

import contextlib
import copy
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from app.contract.model_reference import LoraSpec
from app.contract.spec import MethodSpec, RunPrecision
from workers.run_directory import sync
from workers.training.checkpoints.disk_errors import full_disk_reported
from workers.training.devices.host_memory import available_on_host
from workers.training.exceptions import CannotTrain
from workers.training.models.adapters import adapted_through_their_weights, with_adapters
from workers.training.models.model_parts import language_model_of, towers_within
from workers.training.models.score_head import align_tokenizer, score_layer_of

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

TOLERANCE = {"fp32": 1e-5, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2, "pure_bf16": 2e-2}
"""The allowed relative difference between two ways to compute the same value, by precision."""


def prepare_for_training(
    model: Any,
    *,
    lora: LoraSpec | None,
    seed: int,
    gradient_checkpointing: bool,
    freeze: tuple[str, ...],
    precision: RunPrecision,
    saved: Collection[str] = (),
) -> Any:
    """Prepares a loaded model for training: adapters, gradient checkpointing, frozen parameters, precision.

    Args:
        saved: the names of the values of adapters that are trained further.

    Raises:
        CannotTrain: the adapters cannot be added, the patterns in `freeze` match nothing or everything, or
            the model does not support gradient checkpointing.
    """
    # Padding is on the right, where causal attention ignores it. Checking for it would read from the device.
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    _freeze_towers(model)
    if lora is not None:
        model = with_adapters(model, lora, seed, saved=saved)
    if gradient_checkpointing:
        recompute_activations(model)
    _freeze(model, freeze)
    if precision in AUTOCAST and lora is not None and not lora.merge:
        _narrow_frozen_layers(model, AUTOCAST[precision])
    return model.train()


def _narrow_frozen_layers(model: Any, dtype: torch.dtype) -> None:
    """Converts frozen linear layers to autocast's precision, to which autocast would convert them on each
    use. This gives the same numbers with half the memory. Weights that layers share, as an output head and
    the embedding do, are not converted."""
    from transformers.pytorch_utils import Conv1D

    through_weights = adapted_through_their_weights(model)
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        plain = isinstance(module, (torch.nn.Linear, Conv1D)) and all(p.is_floating_point() for p in own)
        plain = plain and id(module) not in through_weights
        if plain and own and not any(p.requires_grad or owners[id(p)] > 1 for p in own):
            module.to(dtype)


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing: activations are recomputed in the backward pass; the gradient is the same."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # The name since transformers 5.2x; releases before it have only the older one.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise CannotTrain("not_supported", f"gradient_checkpointing: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def without_randomness(model: torch.nn.Module) -> Iterator[None]:
    """Disables dropout and jitter within the block; gradient checkpointing stays on."""
    was = {module: module.training for module in model.modules()}
    recompute = {}
    for module in was:
        module.training = False
        if getattr(module, "gradient_checkpointing", False) and "_gradient_checkpointing_func" in vars(
            module
        ):
            # transformers recomputes a layer only if its `training` flag is set; the layer's own forward
            # uses the same flag for dropout.
            module.training = was[module]
            recompute[module] = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = _in_eval_mode(module, module._gradient_checkpointing_func)
    try:
        yield
    finally:
        for module, function in recompute.items():
            module._gradient_checkpointing_func = function
        for module, training in was.items():
            module.training = training


def turn_dropout_off(model: torch.nn.Module) -> bool:
    """Sets every dropout probability of a model to 0: of its layers, and of its configuration, which some
    layers read in each pass; `save` restores the configuration. Returns whether any was above 0."""
    found = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = "drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout))
            if is_probability and isinstance(value, float) and value > 0.0:
                setattr(module, name, 0.0)
                found = True
    for config in _configs_of(model):
        fields = [name for name in vars(config) if "drop" in name and not name.startswith(_OTHER_HEADS)]
        above = {
            name: own for name in fields if isinstance(own := getattr(config, name), float) and own > 0.0
        }
        if above:
            config.accrue_dropout = above
            for name in above:
                setattr(config, name, 0.0)
            found = True
    return found


_OTHER_HEADS = ("summary_", "classifier", "cls_")
"""How the names of fields begin that concern only heads of models for classification."""


def _restore_dropout(model: torch.nn.Module) -> None:
    for config in _configs_of(model):
        for name, value in getattr(config, "accrue_dropout", {}).items():
            setattr(config, name, value)
        vars(config).pop("accrue_dropout", None)


def _configs_of(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """The configurations of a model and its layers, with those inside of them."""
    waiting = [each for module in model.modules() for each in vars(module).values()]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, PreTrainedConfig) and id(each) not in found:
            found[id(each)] = each
            waiting += vars(each).values()
    return list(found.values())


def _in_eval_mode(layer: torch.nn.Module, checkpoint: Any) -> Any:
    """A checkpointing function under which the layer's own forward is not in training mode."""

    def quiet(function: Any, *arguments: Any) -> Any:
        def forward(*inner: Any) -> Any:
            was, layer.training = layer.training, False
            try:
                return function(*inner)
            finally:
                layer.training = was

        return checkpoint(forward, *arguments)

    return quiet


def copy_in_fp64(model: Any) -> Any:
    """A copy of a model on the host, in fp64; it takes no memory of a GPU.

    Raises:
        RuntimeError, TypeError, MemoryError: it cannot be copied or converted, or memory is insufficient.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(not each.is_floating_point() for each in model.parameters()):
        raise TypeError("the weights are quantized")
    if 8.5 * sum(each.numel() for each in tensors) > available_on_host():
        raise MemoryError
    replaced: dict[int, Any] = {}
    for each in tensors:
        own = each.detach().to("cpu", torch.float64 if each.is_floating_point() else None, copy=True)
        is_parameter = isinstance(each, torch.nn.Parameter)
        replaced[id(each)] = torch.nn.Parameter(own, each.requires_grad) if is_parameter else own
    copied = copy.deepcopy(model, replaced).to("cpu", torch.float64)
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # grouped products have no fp64
    for module in copied.modules():
        module._compiled_call_impl = None
    return copied


def parameters_by_layer(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """The trainable parameters by layer: each block of the model, and everything outside of the blocks."""
    layers: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = name.removeprefix("base_model.model.").split(".")
            numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            end = numbered + 1 if numbered is not None else max(1, len(parts) - 1)
            layers.setdefault(".".join(parts[:end]), []).append(parameter)
    return layers


def _freeze_towers(model: Any) -> None:
    """Freezes what does not compute text: towers for images or sound, and what connects them."""
    text = language_model_of(model)
    for tower in towers_within(text):
        tower.requires_grad_(False)
    if text is model:
        return
    trained = set(text.parameters())
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        trained.update(layer.parameters() if isinstance(layer, torch.nn.Module) else ())
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


def _freeze(model: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            raise CannotTrain("freeze", f"freeze: no parameter matches {pattern!r}; the first are "
                              f"{', '.join(list(parameters)[:5])}")  # fmt: skip
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise CannotTrain(
            "freeze", "freeze matches all parameters, so nothing would be trained: remove some patterns"
        )


def autocast(precision: RunPrecision, device: str) -> Any:
    """The context of a forward pass in a precision."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=AUTOCAST[precision])


_SCALING_OF_WEIGHTS = "rescale_every"
"""A field of RWKV's config: at inference, its model divides the weights of later layers by powers of two in
place, and multiplies them again when it is trained."""


def keep_weights(config: Any) -> None:
    """Keeps a model from changing its weights at inference, so that evaluations and checkpoints see those
    that were trained. `save` restores the field."""
    if getattr(config, _SCALING_OF_WEIGHTS, 0):
        config.accrue_rescale_every = config.rescale_every
        config.rescale_every = 0


def _restore_scaling(config: Any) -> None:
    if hasattr(config, "accrue_rescale_every"):
        config.rescale_every = config.accrue_rescale_every
        del config.accrue_rescale_every


def has_low_precision_weights(model: torch.nn.Module) -> bool:
    """Whether some weights have fewer than 32 bits."""
    return any(
        weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
        for weight in model.parameters()
    )


def save(
    model: Any, tokenizer: Any, target: Path, method: MethodSpec, base: str, revision: str | None = None
) -> tuple[str, ...]:
    """Writes the model, or only its adapters, completely or not at all. Returns the names of the files.

    Merging adapters changes `model` itself.

    Args:
        base: the base model's name, which adapters refer to.
        revision: its revision on the hub.
    """
    if method.lora is not None and method.lora.merge:
        model = model.merge_and_unload()
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    _restore_scaling(model.config)
    _restore_dropout(model)
    if score_layer_of(model) is not None:
        align_tokenizer(tokenizer, model.config)
    try:
        with full_disk_reported():
            _write(model, tokenizer, partial, {"base_model_name_or_path": base, "revision": revision})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees the space again if the disk is full
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync(target.parent)
    return tuple(sorted(file.name for file in target.iterdir()))


def _write(model: Any, tokenizer: Any, folder: Path, base: dict[str, str | None]) -> None:
    """Writes a model's files, and flushes them to disk.

    Args:
        base: the fields of an adapter's config that name its base model.
    """
    model.save_pretrained(folder)
    # Several chat templates would be saved in a folder, and a result consists of plain files.
    tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    if (adapters := folder / "adapter_config.json").exists():  # where peft has put a path of this machine
        adapters.write_text(json.dumps({**json.loads(adapters.read_text()), **base}, indent=2))
    (folder / "README.md").unlink(missing_ok=True)  # peft's, a template that is not filled in
    for path in (*folder.iterdir(), folder):
        sync(path)
