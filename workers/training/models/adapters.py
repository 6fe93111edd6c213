"""Low-rank adapters, and which weights of a model get them."""

import functools
import warnings
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from app.contract.model_reference import LoraSpec
from workers.training.exceptions import CannotTrain
from workers.training.models.adapter_forward import add_in_place
from workers.training.models.model_parts import language_model_of, towers_within
from workers.training.models.score_head import score_layer_of

_RENAMED = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
"""Names that experts' layers had in older releases of transformers. In some mixtures of experts, peft takes
any layer with such a name for an expert, even a plain one, so these are adapted through their weights."""


class Targets(NamedTuple):
    """What is adapted: suffixes of the names of linear layers, and of weights."""

    modules: list[str]
    weights: list[str]


def default_targets(model: torch.nn.Module) -> Targets:
    """Every linear layer of the language model, and the weights of experts that one tensor holds together.

    Not adapted are the output head, routers, and in state spaces the layers whose weights are passed on to a
    kernel: an adapter on such a layer would have no effect.
    """
    text = language_model_of(model)
    head = getattr(model, "get_output_embeddings", lambda: None)() or score_layer_of(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is text and name), "")
    left_out = {id(layer) for module in text.modules() for layer in _left_out(module)} | {id(head)}
    left_out |= _within_towers(text)
    linear: list[str] = []
    renamed: list[str] = []
    experts: list[str] = []
    for name, module in text.named_modules():
        if _is_linear(module) and id(module) not in left_out:
            (renamed if name.rpartition(".")[2] in _RENAMED else linear).append(prefix + name)
        experts += [f"{prefix}{name}.{weight}" for weight in _weights_of_experts(module)]
    if not experts:
        linear, renamed = linear + renamed, []
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    return Targets(
        _suffixes(linear, modules), _suffixes(experts + [f"{name}.weight" for name in renamed], weights)
    )


def with_adapters(model: Any, lora: LoraSpec, seed: int, *, saved: Collection[str] = ()) -> Any:
    """Adds low-rank adapters to the model, and trains only these. The seed determines their initial
    values.

    Args:
        saved: the names of the adapter values that an earlier job saved; the same weights are adapted, so
            that these values can be loaded.

    Raises:
        CannotTrain: they match nothing, or cannot be added to what they match, or could not be merged.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    targets, dropout = _targets(model, lora, saved)
    config = LoraConfig(
        task_type="CAUSAL_LM" if score_layer_of(model) is None else "SEQ_CLS",  # whose head is trained, too
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=dropout,
        target_modules=targets.modules,
        target_parameters=targets.weights or None,
        fan_in_fan_out=not targets.weights and any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        why = str(error).splitlines()[0]
        if "No modules were targeted" in why:
            why = "target_modules names only the layer that scores texts, which is trained anyway"
        if why.startswith("Target module "):  # followed by that module, over many lines
            why = f"target_modules names {why.split()[2].partition('(')[0]}, which is not a linear layer"
        raise CannotTrain("lora", f"lora: {why}") from error
    if lora.merge:
        check_mergeable(adapted)
    _freeze_what_is_not_loaded_again(adapted)
    add_in_place(adapted)
    for layer in _adapted_through_weights(adapted):
        # The sum of a weight and its adapter is as large as the weight, and would be kept until the backward
        # pass in every layer.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return adapted


def _targets(model: torch.nn.Module, lora: LoraSpec, saved: Collection[str]) -> tuple[Targets, float]:
    """What is adapted, and with which dropout. The adapter of a weight is added to the weight: there is no
    input that dropout could apply to."""
    if lora.target_modules and not saved:
        _check_named(model, lora.target_modules)
    targets = _within_the_text(model, lora.target_modules) if lora.target_modules else default_targets(model)
    dropout = lora.dropout
    if targets.weights and saved and not _adapts_any(model, targets.weights, saved):
        targets = targets._replace(weights=[])
        warnings.warn(
            "the experts get no adapters, because the job that is continued gave them none", stacklevel=2
        )
    elif targets.weights and dropout and saved:
        dropout = 0.0
        warnings.warn(
            "LoRA's dropout was set to 0, because the job that is continued has adapters on its experts, "
            "which cannot have dropout",
            stacklevel=2,
        )
    elif targets.weights and dropout:
        targets = targets._replace(weights=[])
        warnings.warn(
            "the experts are not adapted, since LoRA's dropout cannot be applied to them: set dropout to 0 "
            "to adapt them too",
            stacklevel=2,
        )
    return targets, dropout


def _freeze_what_is_not_loaded_again(adapted: Any) -> None:
    """Freezes adapters that peft would not load again, so that they keep having no effect: transformers
    renames the layers of some families on loading, and a few of the new names are wrong."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what would be saved beside the adapters
        found: Any = set_peft_model_state_dict(adapted, get_peft_model_state_dict(adapted))
    named = {
        name: weight for name, weight in adapted.named_parameters(remove_duplicate=False) if ".lora_" in name
    }
    missing = named.keys() & set(found.missing_keys)
    loaded = {id(weight) for name, weight in named.items() if name not in missing}
    lost = {name for name in missing if id(named[name]) not in loaded}  # a layer may have several names
    for name in lost:
        named[name].requires_grad_(False)
    if lost:
        layers = sorted({plain_name(name.partition(".lora_")[0]) for name in lost})
        some = ", ".join(layers[:_SHOWN]) + (", …" if len(layers) > _SHOWN else "")
        warnings.warn(
            f"these layers get no adapters, because peft could not load them again: {some}", stacklevel=2
        )


_SHOWN = 4


def _adapts_any(model: torch.nn.Module, weights: Collection[str], saved: Collection[str]) -> bool:
    """Whether saved adapters include any of the weights that are named by suffix."""
    owners = {
        name.rpartition(".")[0]
        for name, _ in model.named_parameters()
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in weights)
    }
    return not owners.isdisjoint(plain_name(name.partition(".lora_")[0]) for name in saved)


def check_mergeable(adapted: torch.nn.Module) -> None:
    """Checks that the adapters can be merged: where an adapted layer shares its weight with another, as an
    output head does with the embeddings, merging would change both.

    Raises:
        CannotTrain: they cannot.
    """
    users: dict[int, set[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(name)
    for name, module in adapted.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        for weight in module.get_base_layer().parameters():
            others = [each for each in users[id(weight)] if not _is_within(adapted, each, module)]
            if others:
                layer, other = (plain_name(each) for each in (name, others[0].rpartition(".")[0]))
                raise CannotTrain(
                    "lora",
                    f"lora: {layer} shares its weights with {other}, which merged adapters would change "
                    f"too: for a new job, set merge to false, or leave {layer} out of target_modules; "
                    "adapters that are trained already can be trained further by the method lora, and used "
                    "with peft's PeftModel",
                )


def _is_within(model: torch.nn.Module, parameter: str, module: torch.nn.Module) -> bool:
    """Whether a parameter, by name, belongs to a module, which may have several names."""
    parts = parameter.split(".")
    return any(model.get_submodule(".".join(parts[:length])) is module for length in range(1, len(parts)))


def plain_name(name: str) -> str:
    """The name of a module, or of a parameter, as in the base model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace(".original_module", "").replace(".modules_to_save.default", "")


_LISTED = 12


def _check_named(model: torch.nn.Module, named: Collection[str]) -> None:
    """Warns of suffixes that name no module: a misspelt one would train fewer layers than requested. One list
    for several families has such names, too.

    Raises:
        CannotTrain: none of them names a module.
    """
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules())
    unknown = [
        suffix for suffix in named if not any(f".{name}".endswith(f".{suffix}") for name in modules if name)
    ]
    if not unknown:
        return
    linear = (torch.nn.Linear, Conv1D)
    layers = {name.rpartition(".")[2] for name, own in modules.items() if isinstance(own, linear)}
    problem = f"lora: target_modules: no module is named {' or '.join(map(repr, unknown))}"
    known = f"the linear layers are {', '.join(sorted(layers)[:_LISTED])}"
    if len(unknown) == len(named):
        raise CannotTrain("lora", f"{problem}; {known}")
    warnings.warn(f"{problem}, which has no effect; {known}", stacklevel=2)


def _within_the_text(model: torch.nn.Module, named: Collection[str]) -> Targets:
    """The modules that a request names by suffix; in a model with vision or audio encoders, only those within
    the language model.

    Raises:
        CannotTrain: only a tower has such modules.
    """
    text = language_model_of(model)
    towers = _within_towers(text)
    if text is model and not towers:
        return Targets(list(named), [])
    head = getattr(model, "get_output_embeddings", lambda: None)()
    own = ({id(module) for module in text.modules()} | {id(head)}) - towers
    found = [
        (name, id(module) in own)
        for name, module in model.named_modules()
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in named)
    ]
    if found and not any(is_own for _, is_own in found):
        raise CannotTrain(
            "lora",
            f"lora: target_modules: {', '.join(named)} are not part of the language model, and only that is "
            "trained",
        )
    if all(is_own for _, is_own in found):
        return Targets(list(named), [])
    modules = [name for name, _ in model.named_modules()]
    return Targets(_suffixes([name for name, is_own in found if is_own], modules), [])


def _within_towers(text: torch.nn.Module) -> set[int]:
    """The ids of all modules of towers within the language model."""
    return {id(module) for tower in towers_within(text) for module in tower.modules()}


def adapted_through_their_weights(model: torch.nn.Module) -> set[int]:
    """The ids of modules that have an adapter added to a weight, not to their output."""
    return {id(layer.get_base_layer()) for layer in _adapted_through_weights(model)}


def _adapted_through_weights(model: torch.nn.Module) -> Iterator[Any]:
    """The outermost adapter of each module whose weights have adapters."""
    inner = set()
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper" and id(module) not in inner:
            below: Any = module
            while type(below := below.base_layer).__name__ == "ParamWrapper":
                inner.add(id(below))
            yield module


def _left_out(module: torch.nn.Module) -> list[Any]:
    """The layers within a module that it uses without calling them, or whose forward returns more than the
    product."""
    if any(word in type(module).__name__ for word in ("Router", "Gating")):
        return list(module.modules())
    if hasattr(module, "A_log"):  # the mixer of a state space
        return [getattr(module, name, None) for name in ("out_proj", "dt_proj")]
    return []


def _weights_of_experts(module: torch.nn.Module) -> list[str]:
    """The weights of all experts in one tensor, of shape [experts, …, …]."""
    if "Expert" not in type(module).__name__:
        return []
    return [name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3]


def _is_linear(layer: Any) -> bool:
    """Whether a layer maps each input to as many outputs as its weight has. Some classes derived from
    nn.Linear do something else, such as multiplying blocks: there, an adapter would have another shape."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(layer, (torch.nn.Linear, Conv1D)):
        return False
    known = type(layer).forward in (torch.nn.Linear.forward, Conv1D.forward)
    if known or type(layer).__module__.startswith("bitsandbytes"):
        return True
    columns: Any = layer.in_features
    rows: Any = layer.out_features
    weights = {name: value.to("meta") for name, value in layer.state_dict(keep_vars=True).items()}
    given = torch.empty(1, 2, columns, device="meta", dtype=layer.weight.dtype)
    try:
        found = torch.func.functional_call(layer, weights, (given,))
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, 2, rows)


def _suffixes(wanted: Collection[str], names: Collection[str]) -> list[str]:
    """The shortest suffixes, in whole parts, that the wanted names have and no other name has."""
    others: set[str] = set()
    for name in set(names) - set(wanted):
        others.update(_all_suffixes(name))
    return sorted(
        {next((each for each in _all_suffixes(name) if each not in others), name) for name in wanted}
    )


def _all_suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
