"""Records a trace while a training step runs under fake tensors."""

import weakref
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.contract.memory_profile import Kind
from workers.profiling.allocation_trace import AllocationTrace, Place
from workers.profiling.kernels import Target, fake_output, workspace_bytes

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS = (aten._local_scalar_dense.default,)
_COPIES = (aten._to_copy.default,)
_SUM = aten.add.Tensor
_RESIZE = UntypedStorage.resize_
_PRODUCTS = (aten.mm.default, aten.addmm.default)


class Recorder(TorchDispatchMode):
    """Records when each storage on a device is allocated and freed.

    It sees only what operators return; memory that an operator allocates and frees internally comes from
    `kernels`. Reading the value of a fake tensor returns 1, or `boolean_value` for a boolean. The step's
    tensors are on the CPU, whatever the target; others, such as those on `meta`, are ignored.

    Args:
        target: the kind of device whose kernels' workspaces are added.
        boolean_value: the value that a boolean fake tensor has when it is read.
        divided: the type of tensors of which a rank has only a part; None if there are none.
    """

    def __init__(
        self, target: Target, *, boolean_value: bool = True, divided: type[Tensor] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = AllocationTrace()
        self.by_origin = False
        """Whether an operator is assigned to the group of its inputs, not to the current place's group."""
        self.expanded: dict[int, int] = {}
        """Quantised blocks, and the bytes that each takes when it is dequantised for use."""
        self._target = target
        self._boolean_value = boolean_value
        self._divided = divided
        self._place = Place("start", None)
        self._kind: Kind = "activations"
        self._summed: tuple[int, int] | None = None
        """If the last event was an addition in a backward pass: the blocks of the addend and of the sum."""
        self._blocks: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Live blocks by storage address: a weak reference with a callback for its end, and the number."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it would take a tenth of the time."""
        return False

    def enter(self, phase: str, group: int | None = None, kind: Kind = "activations") -> None:
        """Sets the place and the kind of the allocations that follow."""
        self._place, self._kind = Place(phase, group), kind

    def stop(self) -> AllocationTrace:
        """Stops recording and returns the trace."""
        self._blocks.clear()
        return self.trace

    @property
    def phase(self) -> str:
        return self._place.phase

    def add_existing(self, tensor: Tensor, kind: Kind, group: int | None) -> int | None:
        """Adds a tensor that already exists. Returns its block, or None if its storage is already on the
        trace."""
        if self._block_of(tensor) is not None:
            return None
        self._place = Place(self._place.phase, group)
        return self._allocated(tensor, kind)

    def label(self, tensor: Tensor, kind: Kind) -> int | None:
        """Sets the kind of a tensor. Returns its block, or None if the tensor is not in the trace."""
        block = self._block_of(tensor)
        if block is not None:
            self.trace.blocks[block].kind = kind
        return block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # queried a dozen times per operator, so it is answered here
            return args[0].device
        if func in _READS and isinstance(args[0], FakeTensor):
            return (
                self._boolean_value
                if args[0].dtype == torch.bool
                else 1.0
                if args[0].is_floating_point()
                else 1
            )
        if self._divided is not None and self._divided in types:
            return NotImplemented  # it runs the same operator on the part that this rank has
        kwargs = kwargs or {}
        output = fake_output(func, args, kwargs)
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
            self.trace.free(self._place, self.trace.allocate(self._place, taken, "workspace"))
        return output

    def _see(self, tensor: Tensor, kind: Kind) -> None:
        if tensor.device.type == "cpu" and self._block_of(tensor) is None:
            self._allocated(tensor, kind)

    def _allocated(self, tensor: Tensor, kind: Kind) -> int:
        return self._add_storage(tensor.untyped_storage(), kind)

    def _add_storage(self, storage: UntypedStorage, kind: Kind) -> int:
        address = storage._cdata
        block = self.trace.allocate(self._place, storage.nbytes(), kind)
        self._blocks[address] = (weakref.ref(storage, lambda _: self._freed(address)), block)
        return block

    def __enter__(self) -> Self:
        UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = _RESIZE  # type: ignore[method-assign]

    def _resized(self, storage: UntypedStorage, size: int) -> None:
        """FSDP empties the storage of whole parameters, and fills it again when they are needed."""
        _RESIZE(storage, size)
        known = self._blocks.pop(storage._cdata, None)
        if known is not None:
            self.trace.free(self._place, known[1])
        if size:
            self._add_storage(storage, "weights")

    def _freed(self, address: int) -> None:
        _, block = self._blocks.pop(address)
        summed, self._summed = self._summed, None
        if summed and summed[0] == block and self.trace.undo_last(summed[1]):
            self._rename(summed[1], block)
        else:
            self.trace.free(self._place, block)

    def _pair(self, args: tuple[Any, ...], output: Tensor) -> tuple[int, int] | None:
        """The blocks of a gradient and of its sum with another, if they are alike.

        Autograd adds up gradients in place where nothing else holds the first of them (PyTorch's
        torch/csrc/autograd/input_buffer.cpp), but not with fake tensors: there the sum is a new tensor,
        and the first gradient is freed right after. A gradient that is a view, such as that of a linear layer
        over three dimensions, is not added to in place, since its base also holds the memory.
        """
        block, made = self._block_of(args[0]), self._block_of(output)
        if args[0]._is_view():  # its base holds the memory, too
            return None
        if block is None or made is None or self.trace.blocks[block].size != self.trace.blocks[made].size:
            return None
        return block, made

    def _rename(self, made: int, block: int) -> None:
        """Replaces a block that was recorded as new by the existing block that it continues."""
        address = next(key for key, (_, own) in reversed(self._blocks.items()) if own == made)
        self._blocks[address] = (self._blocks[address][0], block)

    def _block_of(self, tensor: Tensor) -> int | None:
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return found[1] if found else None

    def _kind_of_copy(self, source: Tensor) -> Kind:
        """A copy of a weight in another precision is a weight."""
        block = self._block_of(source)
        weight = block is not None and self.trace.blocks[block].kind == "weights"
        return "weights" if weight else self._kind

    def _follow(self, args: tuple[Any, ...], position: int | None = None) -> None:
        """Sets the group to that of the inputs; of inputs that are lists, only the entries at `position`
        count.

        If the inputs belong to several groups, the last one is used, since it adds to the results of earlier
        ones; in a backward pass the first, since gradients of shared values come from the last.
        """
        groups = []
        for argument in args:
            listed = isinstance(argument, (tuple, list))
            for number, each in enumerate(argument if listed else (argument,)):
                if isinstance(each, Tensor) and (not listed or position in (None, number)):
                    block = self._block_of(each)
                    groups.append(None if block is None else self.trace.blocks[block].group)
        known = [group for group in groups if group is not None]
        if known:
            self._place = Place(self._place.phase, min(known) if _in_backward() else max(known))


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
