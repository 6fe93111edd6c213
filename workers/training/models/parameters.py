"""A model's trainable parameters by name, whole on this rank or divided among ranks."""

from torch import Tensor, nn


class Parameters:
    """Trainable parameters that are whole on this rank.

    `trained` maps their names to the tensors that the optimizer trains and the window accumulates for;
    `names` maps tensors to names.
    """

    is_sharded = False
    exchanges_in_each_pass = False
    """Whether each forward and backward pass waits for those of other ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def of(self, parameter: Tensor) -> nn.Parameter:
        """The tensor that the optimizer steps for a parameter of the model: if that is divided, this rank's
        part."""
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def whole(self, name: str, own: Tensor) -> Tensor:
        """Gathers the whole of a tensor of which each rank has a part: a weight, or a state of an optimizer.

        Every rank calls it for the same tensors in the same order. If they are divided, only rank 0 gets
        them, on the host.
        """
        return own.detach()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return whole


def parameters_by_layer(model: nn.Module) -> dict[str, list[Tensor]]:
    """The trainable parameters by layer: each block of the model, and everything outside of the blocks."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = name.removeprefix("base_model.model.").split(".")
            numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            end = numbered + 1 if numbered is not None else max(1, len(parts) - 1)
            layers.setdefault(".".join(parts[:end]), []).append(parameter)
    return layers
