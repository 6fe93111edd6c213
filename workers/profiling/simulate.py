"""The trainer's own window under fake tensors: what a training step allocates, without weights or a GPU."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.contract.arguments import OPTIMIZER_ARGUMENTS
from app.contract.memory_profile import Recipe
from app.contract.spec import OptimizerSpec
from app.planning.families import OWN_LOGITS
from workers.profiling import quantised_sizes
from workers.profiling.allocation_trace import AllocationTrace
from workers.profiling.depth import Depth, config_for, with_layers
from workers.profiling.layers import follow, layers_of, weights_by_group
from workers.profiling.on_cuda import OnCuda
from workers.profiling.recorder import Recorder
from workers.profiling.unroll import REPEATED, unroll
from workers.training.checks.loss_checks import reports_routing
from workers.training.gradients.direct_sums import DirectSums
from workers.training.gradients.gradient_sums import Gradients, gradients_for
from workers.training.kernels.attention import heads_repeated
from workers.training.losses.load_balancing_loss import LoadBalancingLoss, load_balancing_loss_of
from workers.training.losses.loss import Forward, TokenLoss
from workers.training.micro_batches.batches import MicroBatch
from workers.training.models.auto_class import auto_class
from workers.training.models.head import Head, head_of
from workers.training.models.precision import autocast
from workers.training.models.score_head import score_layer_of
from workers.training.models.trainable import prepare_for_training
from workers.training.optimizer import make_optimizer
from workers.training.replica import add
from workers.training.window import Clipping, LossScale, Window

if TYPE_CHECKING:
    from workers.profiling.sharded import Sharded

_WARM_UP = 8
"""Rows and tokens of the first passes of a divided model, which also set up what later ones use again."""

MICRO_BATCHES = 2
"""The first micro-batch and one that accumulates: all further ones are like the second."""


@dataclass(frozen=True)
class Chunks:
    """Positions in the first and in the second chunk of the loss; further ones take no more than these."""

    first: int
    second: int = 0


@dataclass(frozen=True)
class _FewChunks(Head):
    """Processes only the first two chunks, or two of the requested sizes: all others need the same memory."""

    requested: Chunks | None = None

    @property
    def rows(self) -> int:
        return self.requested.first if self.requested else super().rows

    def starts(self, positions: int) -> Sequence[int]:
        if self.requested is None:
            return range(0, positions, self.rows)[:2]
        return (0, positions - self.requested.second) if self.requested.second else (0,)


@dataclass
class _Step:
    """The part of a run that `replica.add` needs."""

    window: Window
    gradients: Gradients
    balance: LoadBalancingLoss | None
    token_loss: TokenLoss
    precision: Any

    def forward(self, batch: MicroBatch) -> Forward:
        with self.precision():
            found: Forward = self.token_loss(batch)
            return found


class Simulation:
    """A model of a given depth under fake tensors, ready to be traced at any micro-batch.

    Args:
        config: the content of a config.json.
    """

    def __init__(self, config: dict[str, Any], recipe: Recipe, depth: Depth) -> None:
        _start_autograd()
        self._mode = FakeTensorMode()
        self.recipe = recipe
        self._depth = depth
        self._divided: Sharded | None = None
        with torch.device("meta"), _quiet():
            self._model = self._build(config)
        with self._mode:
            _materialise(self._model)
        self._balance = load_balancing_loss_of(self._model, recipe.aux_scope)
        smoothing = 0.1 if recipe.label_smoothing else 0.0
        self._token_loss = TokenLoss(self._model, smoothing=smoothing, routed=self._balance is not None)
        score = score_layer_of(self._model)
        if score is not None:
            head: Head | None = Head(score, 1.0, None)
            self._token_loss.probes = False
        else:
            head = None if config.get("model_type") in OWN_LOGITS else head_of(self._model)
        self._head = None if head is None else replace(head, device=recipe.device)
        self._token_loss.head = self._head
        if self._balance is not None and not self._reports_routing():
            self._balance = None
            self._token_loss.stop_routing()
        self.chunks_at_once = self._are_chunks_at_once()
        self._divided = None if recipe.parts == 1 else _divided(self._token_loss, recipe)
        if self._divided is not None:
            self.trace(_WARM_UP, _WARM_UP)  # the first passes also set up what later ones use again

    def whole(self, rows: int, sequence: int) -> AllocationTrace:
        """Traces the model, and extends the trace to the model's full depth.

        Raises:
            NotUniform: the layers that were left out are not like those that were traced.
        """
        return self.unrolled(self.trace(rows, sequence))

    def unrolled(self, trace: AllocationTrace) -> AllocationTrace:
        """A trace at the model's whole depth; copies of a block are the same `Block`.

        Raises:
            NotUniform: the layers that were left out are not like those that were traced.
        """
        return unroll(trace, self._depth.copies) if self._depth.copies else trace

    def trace(self, rows: int, sequence: int, chunks: Chunks | None = None) -> AllocationTrace:
        """Traces one window of two micro-batches, after a step that creates the optimizer's states.

        Args:
            rows: samples of each micro-batch.
            sequence: tokens of each sample.
            chunks: the sizes of the loss's chunks, if they must differ from the trainer's.
        """
        recorder = self._recorder()
        with self._mode, _quiet(), _as_if_real(), self._on_target():
            return self._trace(recorder, rows, sequence, chunks)

    def _recorder(self) -> Recorder:
        return Recorder(
            self.recipe.device,
            boolean_value=not self.recipe.packing,
            divided=None if self._divided is None else self._divided.tensor_type,
        )

    def _on_target(self) -> contextlib.AbstractContextManager[object]:
        return OnCuda() if self.recipe.device == "cuda" else contextlib.nullcontext()

    def _reports_routing(self) -> bool:
        in_precision = autocast(self.recipe.precision, "cpu")
        with self._mode, _quiet(), _as_if_real(), self._on_target(), self._recorder(), in_precision:
            return reports_routing(self._token_loss, _batch(1, 4, packed=False, routed=True))

    def _are_chunks_at_once(self) -> bool:
        """Whether one operator processes all chunks of the loss. The loss itself is run to find out."""
        head = self._head
        if head is None:
            return False
        requested = []

        class Watched(_FewChunks):
            def starts(self, positions: int) -> Sequence[int]:
                requested.append(positions)
                return super().starts(positions)

        with self._mode, _quiet(), torch.no_grad(), autocast(self.recipe.precision, "cpu"):
            dtype = torch.bfloat16 if self.recipe.precision == "pure_bf16" else torch.float32
            hidden = torch.zeros(3, head.weight.shape[1], dtype=dtype)
            batch = _batch(1, 4, packed=False, routed=False)
            self._token_loss._of_hidden(hidden, batch, Watched(**vars(head), requested=Chunks(2)))
        return not requested

    @property
    def chunk_positions(self) -> int:
        """The number of positions per chunk of the loss; 0 if all logits are computed at once."""
        return 0 if self._head is None else self._head.rows

    @property
    def parameters(self) -> int:
        """The parameters of the model at its full depth."""
        return self._count(lambda _: True)

    @property
    def trainable(self) -> int:
        """The trained parameters at the full depth."""
        return self._count(lambda parameter: parameter.requires_grad)

    def _count(self, counts: Callable[[Tensor], bool]) -> int:
        found = {id(tensor): (tensor, group) for tensor, group in weights_by_group(self._model, self._depth)}
        return sum(
            tensor.numel() * (self._depth.copies or 1 if group == REPEATED else 1)
            for tensor, group in found.values()
            if isinstance(tensor, nn.Parameter) and counts(tensor)
        )

    def _build(self, config: dict[str, Any]) -> Any:
        made = config_for(with_layers(config, self._depth.traced))
        if self.recipe.scores:
            made.num_labels = self.recipe.scores
        built = auto_class(made, scores=self.recipe.scores > 0)
        attention = (
            "eager" if self.recipe.attention == "eager" else "sdpa"
        )  # flash attention keeps the same tensors
        dtype = torch.bfloat16 if self.recipe.precision == "pure_bf16" else torch.float32
        try:
            model = built.from_config(made, dtype=dtype, attn_implementation=attention)
        except ValueError:
            if attention != "sdpa":
                raise
            model = built.from_config(made, dtype=dtype, attn_implementation="eager")
        if self.recipe.quantised:
            quantised_sizes.to_compute_precision(layers_of(model))
        return prepare_for_training(
            model,
            lora=self.recipe.lora,
            seed=0,
            gradient_checkpointing=self.recipe.gradient_checkpointing,
            freeze=self.recipe.freeze,
            precision=self.recipe.precision,
        )

    def _trace(self, recorder: Recorder, rows: int, sequence: int, chunks: Chunks | None) -> AllocationTrace:
        model, recipe = self._model, self.recipe
        recorder.enter("load")
        for tensor, group in weights_by_group(self._model, self._depth):
            own = tensor if self._divided is None else self._divided.own_part(tensor)
            block = recorder.add_existing(own, "weights", group)
            if block is not None and self.recipe.quantised and quantised_sizes.is_quantised(tensor, group):
                recorder.trace.blocks[block].size = quantised_sizes.stored_bytes(tensor)
                recorder.expanded[block] = tensor.untyped_storage().nbytes()
        parameters = list(
            model.parameters() if self._divided is None else self._divided.parameters.trained.values()
        )
        optimizer = (
            _OffDeviceOptimizer(parameters)
            if recipe.optimizer_on_cpu
            else make_optimizer(_optimizer(recipe), parameters)
        )
        scale = LossScale(1.0) if recipe.precision == "fp16" else None
        direct = self._token_loss.direct = DirectSums(model) if recipe.direct_sums else None
        gradients = (
            gradients_for(parameters, in_fp32=recipe.accumulate_in_fp32, host=_host(recipe), direct=direct)
            if self._divided is None
            else self._divided.sums()
        )
        clipping = Clipping(1.0 if recipe.clips else None)
        window = Window(parameters, optimizer, clipping, scale, gradients=gradients)
        balance, loss = self._balance, self._token_loss
        if self._head is not None:
            loss.head = _FewChunks(**vars(self._head), requested=chunks)
        keeps = not recipe.gradient_checkpointing
        in_precision = partial(autocast, recipe.precision, "cpu", keeps_copies=keeps)
        step = _Step(window, gradients, balance, loss, in_precision)
        hooks = follow(recorder, model, self._depth, routed=balance is not None)
        try:
            with heads_repeated(recipe.device, recipe.precision, flash=recipe.flash_attention), recorder:
                self._make_states(recorder, optimizer, parameters)
                self._window(recorder, step, rows, sequence)
            return recorder.stop()
        finally:
            for hook in hooks:
                hook.remove()
            gradients.release()

    def _make_states(
        self, recorder: Recorder, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
    ) -> None:
        """Runs one step of the optimizer, which creates its states."""
        recorder.enter("states")
        recorder.by_origin = True
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        for tensor in _states(optimizer):
            block = recorder.label(tensor, "optimizer")
            if block is not None and self.recipe.optimizer == "adamw_8bit":
                recorder.trace.blocks[block].size = quantised_sizes.state_bytes(tensor)
        for parameter in parameters:
            parameter.grad = None
        recorder.by_origin = False

    def _window(self, recorder: Recorder, step: _Step, rows: int, sequence: int) -> None:
        recorder.enter("batch")
        batch = _batch(rows, sequence, self.recipe.packing, step.balance is not None)
        if self.recipe.scores:  # of each sequence's last token
            one_each = torch.zeros(rows, dtype=torch.int64)
            batch = replace(batch, target_positions=one_each, targets=one_each)
        if step.balance is not None:
            step.balance.begin(rows * MICRO_BATCHES)
            if step.balance.scope == "window":
                recorder.enter("routing")
                with step.precision():
                    step.balance.observe(step.token_loss.router_logits(batch), batch)
        step.window.open(rows * sequence, MICRO_BATCHES)
        for number in range(MICRO_BATCHES):
            recorder.by_origin = False
            recorder.enter(f"forward {number}")
            add(step, batch)
            for gradient in step.gradients.sums().values():
                recorder.label(gradient, "gradients")
        recorder.enter("close")
        recorder.by_origin = True
        step.window.close()
        recorder.by_origin = False


class _OffDeviceOptimizer(torch.optim.Optimizer):
    """An optimizer whose states and arithmetic are on the host (training/optimizer.py: OnHost)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([p for p in parameters if p.requires_grad], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing, since the step takes no memory on the device."""


@cache
def _start_autograd() -> None:
    """Makes the process's first backward pass, before there are fake tensors: in that pass, PyTorch starts a
    thread for each GPU that it finds, and now it finds none.

    In builds with CUDA, fake tensors pretend that there are eight GPUs where there is none
    (`_ensureCUDADeviceGuardSet`). PyTorch would start threads for them, after which a process cannot fork
    (parallel_forks.py)."""
    torch.ones((), requires_grad=True).backward()


def _divided(token_loss: TokenLoss, recipe: Recipe) -> "Sharded":
    from workers.profiling.sharded import Sharded  # rarely needed, and slow to load

    return Sharded(token_loss, recipe.parts, recipe.zero_stage)


def _materialise(model: nn.Module) -> None:
    """Replaces parameters and buffers on the meta device by fake CPU tensors; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor)
                    own[name] = made[id(tensor)]  # type: ignore[assignment]


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _host(recipe: Recipe) -> torch.device | None:
    """Where gradients are kept if not on the device: for a GPU, on the meta device, which is not recorded."""
    if not recipe.accumulate_on_cpu:
        return None
    return torch.device("meta" if recipe.device == "cuda" else "cpu")


def _batch(rows: int, sequence: int, packed: bool, routed: bool) -> MicroBatch:
    """A micro-batch of full length in which every token but the first counts."""
    tokens = rows * sequence
    shape = (1, tokens) if packed else (rows, sequence)
    return MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        target_positions=torch.zeros(tokens - rows, dtype=torch.int64),
        targets=torch.zeros(tokens - rows, dtype=torch.int64),
        lengths=(sequence,) * rows,
        position_ids=torch.zeros(shape, dtype=torch.int64) if packed else None,
        token_positions=torch.zeros(tokens, dtype=torch.int64) if routed else None,
        sample_of_token=torch.zeros(tokens, dtype=torch.int64) if routed else None,
    )


def _optimizer(recipe: Recipe) -> OptimizerSpec:
    unused = dict.fromkeys(("betas", "eps", "momentum", "nesterov", "trust_coefficient"))
    own = OPTIMIZER_ARGUMENTS[recipe.optimizer]
    if recipe.optimizer == "sgd":
        own = {**own, "momentum": 0.9 if recipe.momentum else 0.0}
    name = "adamw" if recipe.optimizer == "adamw_8bit" else recipe.optimizer
    return OptimizerSpec(name=name, learning_rate=1e-3, weight_decay=0.01, **{**unused, **own})


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disables the libraries' warnings, and the garbage collector, whose pauses are longer than a trace."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _as_if_real() -> Iterator[None]:
    """Stops transformers from making masks that it makes for fake tensors but not for real ones."""
    module: Any = import_module("transformers.masking_utils")
    was = getattr(module, "is_tracing", None)
    module.is_tracing = lambda *_: False
    try:
        yield
    finally:
        module.is_tracing = was
