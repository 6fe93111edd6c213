"""Faster kernels than the model's own, mostly of other packages: used where they are installed, if the
gradient stays the same.

- liger-kernel (Hsu et al. 2024, arXiv:2410.10989) computes norms, rotary embeddings and gated feed-forward
  layers in one kernel each. Its loss is not used: `loss.py` computes the loss in chunks already.
- flash-attn computes the attention of packed rows sample by sample, without a mask; on Hopper, its third
  version is faster for all rows.
- Where flash-attn is not installed, PyTorch's own flash attention computes packed rows in the same way
  (varlen_attention.py).
- Accrue's own kernel computes the cross-entropy in bf16 (fused_cross_entropy.py), where Triton is installed.
- On a CPU, norms and rotary embeddings have backward passes of their own (lean_layers.py), and on processors
  of AMD, oneDNN computes large products of the forward pass (cpu_products.py).

Before the first step of every attempt (on a CPU, of the first attempt), the gradient of two samples is
computed with the kernels and without them. Those that change it by more than rounding, or that fail, are not
used. So a package can make a job faster, but neither wrong nor impossible: if the comparison kills the
process, the next attempt leaves the kernels out.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import inf, isfinite
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from app.contract.spec import Spec
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.checks.gradient_error import gradient_error
from workers.training.checks.loss_checks import typical_samples
from workers.training.data.batch_loader import Loader
from workers.training.devices import device_errors
from workers.training.kernels import varlen_attention
from workers.training.losses.chunked_loss import can_fuse
from workers.training.losses.loss import TokenLoss
from workers.training.models.dropout import without_randomness
from workers.training.models.precision import TOLERANCE
from workers.training.replica import Replica
from workers.training.window import at_safe_loss_scale

_HALVES = ("bf16", "fp16", "pure_bf16")
"""The precisions in which flash-attn runs."""


class Kernels(Protocol):
    """Kernels in place of a model's own."""

    name: str
    """What messages call them: a package and its version, or kernels of Accrue's own."""
    needs_package: bool
    """Whether a package has to be installed for them."""

    def switch_on(self) -> None:
        """Uses the kernels."""

    def switch_off(self) -> None:
        """Uses the model's own."""


_ABSENT = object()


@dataclass
class _Change:
    """An attribute that a package has replaced."""

    place: dict[str, Any]
    name: str
    before: Any
    after: Any

    def set(self, value: Any) -> None:
        if value is _ABSENT:
            self.place.pop(self.name, None)
        else:
            self.place[self.name] = value


class Patch:
    """Kernels that a function puts into a model: it replaces attributes of the model's layers, and of the
    Python modules in which their classes are defined.

    Args:
        apply: called once, when the kernels are switched on for the first time.
    """

    def __init__(
        self, name: str, model: Any, apply: Callable[[], None], *, needs_package: bool = True
    ) -> None:
        self.name, self.needs_package = name, needs_package
        self._model, self._apply = model, apply
        self._changes: list[_Change] | None = None

    def switch_on(self) -> None:
        if self._changes is None:
            self._changes = self._changed_by(self._apply)
        for change in self._changes:
            change.set(change.after)

    def switch_off(self) -> None:
        for change in self._changes or ():
            change.set(change.before)

    def _changed_by(self, apply: Callable[[], None]) -> list[_Change]:
        """The attributes that it changes. If it fails, they are as before."""
        layers = list(self._model.modules())
        code = {type(layer).__module__: sys.modules[type(layer).__module__] for layer in layers}
        places = [vars(each) for each in (*layers, *code.values())]
        before = [dict(place) for place in places]
        try:
            apply()
        finally:
            changes = [
                _Change(place, name, old.get(name, _ABSENT), place.get(name, _ABSENT))
                for place, old in zip(places, before, strict=True)
                for name in place.keys() | old.keys()
                if place.get(name, _ABSENT) is not old.get(name, _ABSENT)
            ]
            for change in changes:
                change.set(change.before)
        return changes


class BoundaryAttention:
    """Attention that gets the places where samples of packed rows begin, such as that of the package
    flash-attn."""

    needs_package = True

    def __init__(self, replica: Replica, implementation: str, name: str) -> None:
        self.name = name
        self._implementation = implementation
        self._loss, self._model = replica.token_loss, base_of(replica.model)
        self._own: str = self._model.config._attn_implementation

    def switch_on(self) -> None:
        self._set(self._implementation)
        self._loss.passes_boundaries = True

    def switch_off(self) -> None:
        self._set(self._own)
        self._loss.passes_boundaries = False

    def _set(self, implementation: str) -> None:
        """Chooses an implementation of attention.

        Raises:
            NotImplementedError: the model does not support it; transformers only logs that.
        """
        self._model.set_attn_implementation(implementation)
        if self._model.config._attn_implementation != implementation:
            raise NotImplementedError(f"the model's attention cannot be {implementation}")


class FusedLoss:
    """Accrue's own kernel for the cross-entropy."""

    needs_package = True

    def __init__(self, token_loss: TokenLoss, name: str) -> None:
        self.name = name
        self._loss = token_loss

    def switch_on(self) -> None:
        self._loss.fused = importlib.import_module(f"{__package__}.fused_cross_entropy").cross_entropy

    def switch_off(self) -> None:
        self._loss.fused = None


def base_of(model: Any) -> Any:
    """The model itself, without the wrapper of its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def installed_kernels(replica: Replica, spec: Spec, *, packed: bool, longest: int) -> list[Kernels]:
    """The kernels of installed packages that a replica could use on its device.

    Args:
        packed: whether rows hold several samples.
        longest: tokens of the longest sample.
    """
    if replica.device.type != "cuda" or not may_replace_kernels(replica, spec):
        return []
    attention = flash_attention(replica, spec, packed=packed, longest=longest)
    liger = _liger(base_of(replica.model))
    return [each for each in (liger, attention, _fused_loss(replica)) if each is not None]


def may_replace_kernels(replica: Replica, spec: Spec) -> bool:
    """Whether a job's kernels may be replaced at all."""
    return not (
        spec.kernels == "none"
        or spec.compile  # which fuses the same layers itself
        or spec.deterministic
        or replica.is_sharded
    )


def _fused_loss(replica: Replica) -> Kernels | None:
    head = replica.token_loss.head
    in_bf16 = replica.precision in ("bf16", "pure_bf16")
    if head is None or not can_fuse(head) or not in_bf16 or importlib.util.find_spec("triton") is None:
        return None
    if replica.token_loss.probes:  # few classes need no faster loss
        return None
    return FusedLoss(replica.token_loss, f"Accrue's cross-entropy in {_named('triton')}")


def _liger(model: Any) -> Kernels | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    try:
        monkey_patch: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except Exception:  # it may be made for other versions of transformers or Triton
        return None
    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return None
    without = {"cross_entropy": False, "fused_linear_cross_entropy": False}

    def apply() -> None:
        code = vars(sys.modules[type(model).__module__])
        own = code.get(ROTARY)
        monkey_patch._apply_liger_kernel_to_instance(model, **without)
        if own is not None and code[ROTARY] is not own:
            code[ROTARY] = for_few_numbers_of_rows(code[ROTARY], own)

    return Patch(_named("liger-kernel"), model, apply)


ROTARY = "apply_rotary_pos_emb"
"""The function of transformers' models that applies rotary embeddings."""

_NUMBERS_OF_ROWS = 12


def for_few_numbers_of_rows(
    fast: Callable[..., tuple[Tensor, Tensor]], own: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rotary embeddings by a kernel for the first twelve numbers of rows that occur, and by the model's own
    operators for all others. liger-kernel compiles its kernel anew for each number of rows, which takes as
    long as a whole window, and the rows of padded micro-batches vary. (The checks before the first step
    already use up to four numbers.)

    Args:
        fast: the kernel; its first argument is of shape (rows, heads, sequence, width).
        own: the model's own function, with the same arguments.
    """
    compiled: set[int] = set()

    def apply(query: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        rows = query.shape[0]
        if rows not in compiled and len(compiled) == _NUMBERS_OF_ROWS:
            return own(query, *others, **named)
        compiled.add(rows)
        return fast(query, *others, **named)

    return apply


def attention_of_each_sample(replica: Replica, spec: Spec, longest: int) -> Kernels | None:
    """For packed rows on a CPU: attention within each sample, by groups of samples of similar length."""
    if spec.attention != "sdpa" or not varlen_attention.suits(base_of(replica.model).config, longest):
        return None
    varlen_attention.register()
    return BoundaryAttention(replica, varlen_attention.NAME, "attention of each sample")


def flash_attention(replica: Replica, spec: Spec, *, packed: bool, longest: int) -> Kernels | None:
    """FlashAttention 3 on Hopper, if it is installed. Otherwise, for packed rows only: FlashAttention 2 if
    it is installed, or else PyTorch's own flash kernel, called without a mask. (For other rows, PyTorch's
    attention uses that kernel already.) None if nothing applies."""
    from transformers.utils import import_utils

    if spec.attention != "sdpa" or replica.precision not in _HALVES:
        return None
    major, _ = torch.cuda.get_device_capability(replica.device)
    if major < 8:  # all of them need Ampere or later
        return None
    if major == 9 and import_utils.is_flash_attn_3_available():
        return BoundaryAttention(replica, "flash_attention_3", _named("flash-attn-3"))
    if packed and import_utils.is_flash_attn_2_available():
        return BoundaryAttention(replica, "flash_attention_2", _named("flash-attn"))
    if packed and varlen_attention.suits(base_of(replica.model).config, longest):
        varlen_attention.register()
        return BoundaryAttention(replica, varlen_attention.NAME, f"flash attention in {_named('torch')}")
    return None


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # its name differs from that of its distribution
        return package


def choose_kernels(
    run: RunDirectory, replica: Replica, loader: Loader, spec: Spec, reporter: Reporter, rank: int
) -> None:
    """Switches on those of the installed kernels that do not change the gradient, and reports them.

    Raises:
        RuntimeError: the device failed; the next attempt leaves the kernels out.
    """
    candidates = installed_kernels(replica, spec, packed=loader.layout.packed, longest=loader.longest)
    if not candidates:
        return
    names = " and ".join(each.name for each in candidates)
    if run.was_ended_while_comparing_kernels(rank):
        message = f"{names}: not used, since an earlier attempt ended while the kernels were compared."
        reporter.event("kernels", message, "warning", used=False)
        return
    with run.comparing_kernels(rank):
        for each in candidates:
            use_if_it_agrees(each, replica, loader, reporter)


def use_if_it_agrees(kernels: Kernels, replica: Replica, loader: Loader, reporter: Reporter) -> None:
    """Switches kernels on if they do not change the gradient, and reports that.

    Raises:
        RuntimeError: the device failed.
    """
    tolerance, error = TOLERANCE[replica.precision], inf
    try:
        error = _change_of_gradient(kernels, replica, loader)
        why = f"it changes the gradient of two samples by {error:.1e} (tolerance {tolerance:g})"
    except Exception as failure:  # a package may raise anything, and the job can do without it
        if _breaks_device(failure):
            raise
        replica.free_memory()
        memory = isinstance(failure, RuntimeError) and device_errors.is_out_of_memory(failure)
        why = (
            "there is too little memory to compare the gradients"
            if memory
            else f"it fails ({type(failure).__name__}: {' '.join(str(failure).split())[:200]})"
        )
    known = error if isfinite(error) else None
    if error <= tolerance:
        kernels.switch_on()
        replica.kernels = (*replica.kernels, kernels)
        message = (
            f"{kernels.name[:1].upper()}{kernels.name[1:]} is used: it changes the gradient of two samples "
            f"by {error:.1e} (tolerance {tolerance:g})."
        )
        reporter.event("kernels", message, package=kernels.name, gradient_error=known, used=True)
        return
    _quietly(kernels.switch_off)
    message = f"{kernels.name[:1].upper()}{kernels.name[1:]} is not used: {why}."
    # A user who installed a package expects that its kernels are used; nobody requests those of Accrue.
    level: Literal["info", "warning"] = "warning" if kernels.needs_package else "info"
    reporter.event("kernels", message, level, package=kernels.name, gradient_error=known, used=False)


def _breaks_device(failure: Exception) -> bool:
    """Whether the process cannot use the device any more."""
    return (
        isinstance(failure, RuntimeError)
        and device_errors.is_transient(failure)
        and not device_errors.is_out_of_memory(failure)
    )


def _quietly(call: Callable[[], None]) -> None:
    """Calls what may fail because an earlier call did."""
    try:
        call()
    except Exception:
        return


def _change_of_gradient(kernels: Kernels, replica: Replica, loader: Loader) -> float:
    """How much kernels change the gradient of two samples: |with - without| / |without|."""
    chosen = typical_samples(loader)
    together = [chosen] if loader.layout.packed else [[each] for each in chosen]
    batches = [loader.fetch(each) for each in together]
    denominator = loader.samples.denominator(np.array(chosen))
    step = replace(replica, balance=None)

    def accumulate(on: bool) -> None:
        if on:
            kernels.switch_on()
        else:
            kernels.switch_off()
        step.window.open(denominator)
        for batch in batches:
            step.add(batch)

    with at_safe_loss_scale(replica.loss_scale), without_randomness(replica.model):
        return gradient_error(step.window, accumulate, True, False)


@contextmanager
def kernels_until_the_end(replica: Replica) -> Iterator[None]:
    """After the block, kernels are not used any more: some of them replace functions of Python modules."""
    try:
        yield
    finally:
        for each in replica.kernels:
            _quietly(each.switch_off)


@contextmanager
def model_kernels(used: Sequence[Kernels]) -> Iterator[None]:
    """Within the block, the model's own kernels run, which also run on a CPU and in fp64."""
    for each in used:
        each.switch_off()
    try:
        yield
    finally:
        for each in used:
            each.switch_on()
