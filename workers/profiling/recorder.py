"""Records a tape while a training step runs, under fake tensors or for real."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.contract.memory_profile import Kind
from workers.profiling.kernels import Target, made_by, workspace_bytes
from workers.profiling.tape import Place, Tape

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS = (aten._local_scalar_dense.default,)
_COPIES = (aten._to_copy.default,)
_SUM = aten.add.Tensor
_PRODUCTS = (aten.mm.default, aten.addmm.default)


class Recorder(TorchDispatchMode):
    """Notes when each storage on a device comes to life and when it dies.

    Sees what operators return, so that memory which an operator takes and gives back by itself is known
    only from `kernels`. Where a fake tensor's value is read, it answers 1, and `truth` for a boolean.
    Tensors are the CPU's, whatever the target; what is elsewhere is passed over.

    Args:
        target: whose kernels' workspaces are added.
        truth: what a boolean that is read from a fake tensor is taken for.
    """

    def __init__(self, target: Target, *, truth: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.by_origin = False
        """Outside of the layers' passes: an operator works for the group that its inputs belong to."""
        self.expanded: dict[int, int] = {}
        """Blocks that are brought into another form wherever they are used, and the bytes of that form."""
        self._target = target
        self._truth = truth
        self._place = Place("start", None)
        self._kind: Kind = "activations"
        self._summed: tuple[int, int] | None = None
        """The block that a backward pass added to, and that of the sum, where this was the last event."""
        self._blocks: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Live blocks by storage address: a weak reference, which notices the end, and the block's number."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it would take a tenth of the time."""
        return False

    def enter(self, phase: str, group: int | None = None, kind: Kind = "activations") -> None:
        """What follows happens there, and what it allocates is of that kind."""
        self._place, self._kind = Place(phase, group), kind

    def stop(self) -> Tape:
        """The tape, to which nothing is added from here on."""
        self._blocks.clear()
        return self.tape

    @property
    def phase(self) -> str:
        return self._place.phase

    def know(self, tensor: Tensor, kind: Kind, group: int | None) -> int | None:
        """Takes up a tensor that was made before; its block, null where its storage is known already."""
        if self._block_of(tensor) is not None:
            return None
        self._place = Place(self._place.phase, group)
        return self._allocated(tensor, kind)

    def label(self, tensor: Tensor, kind: Kind) -> int | None:
        """Says what a tensor turned out to be; its block, null where it is not on the tape."""
        block = self._block_of(tensor)
        if block is not None:
            self.tape.blocks[block].kind = kind
        return block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked for a dozen times an operator: answered here, which is faster
            return args[0].device
        if func in _READS and isinstance(args[0], FakeTensor):
            return self._truth if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        kwargs = kwargs or {}
        output = made_by(func, args, kwargs)
        if output is None:
            output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            if self.by_origin:
                self._follow(args)
            kind = self._kind_of_copy(args[0]) if func in _COPIES else self._kind
            self._see(output, kind)
            if func is _SUM and not torch.is_grad_enabled() and _in_backward():
                self._summed = self._pair(args, output)
        elif isinstance(output, (tuple, list)):
            for position, each in enumerate(output):
                if isinstance(each, Tensor):
                    if self.by_origin:
                        self._follow(args, position)
                    self._see(each, self._kind)
        elif self.by_origin:
            self._follow(args)
        taken = workspace_bytes(func, args, self._target)
        if self.expanded and func in _PRODUCTS:
            used = [self._block_of(each) for each in args if isinstance(each, Tensor)]
            taken += sum(self.expanded.get(block, 0) for block in used if block is not None)
        if taken:
            self.tape.free(self._place, self.tape.allocate(self._place, taken, "workspace"))
        return output

    def _see(self, tensor: Tensor, kind: Kind) -> None:
        if tensor.device.type == "cpu" and self._block_of(tensor) is None:
            self._allocated(tensor, kind)

    def _allocated(self, tensor: Tensor, kind: Kind) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        block = self.tape.allocate(self._place, storage.nbytes(), kind)
        self._blocks[address] = (weakref.ref(storage, lambda _: self._freed(address)), block)
        return block

    def _freed(self, address: int) -> None:
        _, block = self._blocks.pop(address)
        summed, self._summed = self._summed, None
        if summed and summed[0] == block and self.tape.takes_back(summed[1]):
            self._rename(summed[1], block)
        else:
            self.tape.free(self._place, block)

    def _pair(self, args: tuple[Any, ...], output: Tensor) -> tuple[int, int] | None:
        """The blocks of a gradient and of its sum with another, if they are alike.

        Autograd adds up gradients in place where nothing else holds the first of them (PyTorch's
        torch/csrc/autograd/input_buffer.cpp), but never so with fake tensors: there the sum is made again,
        and the first one ends with it. A gradient that is a view, as that of a linear layer over three
        dimensions is, has a base, and is added to out of place.
        """
        block, made = self._block_of(args[0]), self._block_of(output)
        if args[0]._is_view():  # its base holds the memory, too
            return None
        if block is None or made is None or self.tape.blocks[block].size != self.tape.blocks[made].size:
            return None
        return block, made

    def _rename(self, made: int, block: int) -> None:
        """What was noted as a block of its own is another one that lives on."""
        address = next(key for key, (_, own) in reversed(self._blocks.items()) if own == made)
        self._blocks[address] = (self._blocks[address][0], block)

    def _block_of(self, tensor: Tensor) -> int | None:
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None

    def _kind_of_copy(self, source: Tensor) -> Kind:
        """A copy of a weight in another precision is a weight."""
        block = self._block_of(source)
        weight = block is not None and self.tape.blocks[block].kind == "weights"
        return "weights" if weight else self._kind

    def _follow(self, args: tuple[Any, ...], position: int | None = None) -> None:
        """Goes to the group that the inputs belong to; where a list is made of lists, those at a position.

        Of several it is the last, which adds to what the earlier ones made; in a backward pass the first,
        since what is shared comes down from the last.
        """
        groups = []
        for argument in args:
            listed = isinstance(argument, (tuple, list))
            for number, each in enumerate(argument if listed else (argument,)):
                if isinstance(each, Tensor) and (not listed or position in (None, number)):
                    block = self._block_of(each)
                    groups.append(None if block is None else self.tape.blocks[block].group)
        known = [group for group in groups if group is not None]
        if known:
            self._place = Place(self._place.phase, min(known) if _in_backward() else max(known))


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
