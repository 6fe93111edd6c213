"""A model's layers: where they are, which weights they have, and which group is running."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from workers.profiling.depth import Depth
from workers.profiling.recorder import Recorder
from workers.training.models.model_parts import language_model_of


def weights_by_group(model: Any, depth: Depth) -> Iterator[tuple[Tensor, int | None]]:
    """Parameters and buffers in their order, each with its group."""
    layers = {id(layer): number for number, layer in enumerate(layers_of(model))}
    for module, group in _modules(model, layers, depth):
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        yield from ((tensor, group) for tensor in own)


def follow(recorder: Recorder, model: Any, depth: Depth, *, routed: bool) -> list[Any]:
    """Installs hooks that set the recorder's group of layers, forward and backward. Returns the hooks.

    Args:
        routed: whether the loss uses the routers' outputs; each operator of the loss then belongs to the
            group of its inputs.
    """
    layers = layers_of(model)
    hooks: list[Any] = []

    def begins(group: int) -> Any:
        def hook(*_: Any) -> None:
            if not recorder.phase.startswith("backward"):
                recorder.enter(recorder.phase, group)

        return hook

    def ends(below: int | None, last: bool) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if recorder.phase.startswith("backward"):
                return
            phase = recorder.phase
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.requires_grad and below is not None:
                hidden.register_hook(_backward(recorder, phase, below))
            if last:
                recorder.enter(phase, None, "logits")
                recorder.by_origin = routed  # the load-balancing loss uses the output of every layer's router

        return hook

    def enters(_module: Any, inputs: Any) -> None:
        given = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        if not recorder.phase.startswith("backward") and given is not None and given.requires_grad:
            given.register_hook(_backward(recorder, recorder.phase, None))

    # The first hooks, so that what other hooks do is recorded in the right group.
    hooks.append(layers[0].register_forward_pre_hook(enters, prepend=True))
    for number, layer in enumerate(layers):
        group = depth.group_of(number)
        hooks.append(layer.register_forward_pre_hook(begins(group), prepend=True))
        hooks.append(layer.register_forward_hook(ends(group, number == len(layers) - 1), prepend=True))
    return hooks


def _backward(recorder: Recorder, phase: str, group: int | None) -> Any:
    def hook(_gradient: Tensor) -> None:
        recorder.by_origin = False
        recorder.enter(phase.replace("forward", "backward"), group)

    return hook


def layers_of(model: Any) -> nn.ModuleList:
    """The list of a language model's layers: the first module list of its decoder that is as long as the
    number of layers, or else the longest.

    Raises:
        ValueError: the model has no list of modules.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    count = getattr(inner.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in language_model_of(inner).modules() if isinstance(module, nn.ModuleList)]
    alike = next((each for each in lists if len(each) == count), None)
    if alike is None and not lists:
        raise ValueError(f"{type(inner).__name__} has no list of layers")
    return alike if alike is not None else max(lists, key=len)


def _modules(module: nn.Module, layers: dict[int, int], depth: Depth, group: int | None = None) -> Any:
    """Every module once, with the group of layers that it is in."""
    if id(module) in layers:
        group = depth.group_of(layers[id(module)])
    yield module, group
    for child in module.children():
        yield from _modules(child, layers, depth, group)
