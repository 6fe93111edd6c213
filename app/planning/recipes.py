"""Builds the recipe of a training step, and chooses a precision that the device supports."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from app.contract.accumulation import Precision
from app.contract.memory_profile import Recipe
from app.contract.spec import Attention, MethodSpec, OptimizerName, RunPrecision, Spec
from app.planning.data_sheets import similar_data_sheet
from app.planning.devices import Device

_WITHOUT_BF16 = re.compile(
    r"\b(P4|P6|P40|P100|P?V100S?|T4G?|T[456]00|T550|T1000|T1200|T2000|M\d\d|K\d\d)\b"
    r"|\b(GTX|TITAN|GEFORCE MX|MX ?\d{3})\b|\bRTX ?20[5-8]0\b|\bQUADRO\b|\b[PK]\d{3,4}\b"
    r"|\bRTX [345678]000\b(?!.*\bADA\b)"
)
"""Names of GPUs older than Ampere (compute capability 8.0), which have no bf16: Kepler, Maxwell, Pascal,
Volta and Turing in CUDA's list of GPUs by compute capability. Used for declared GPUs without a data sheet: a
detected one reports its capability."""

_JOINED = re.compile(
    r"(?<=NVIDIA)(?=\w)|(?<=TESLA)(?=\w)|(?<=TITAN)(?=\w)|(?<=QUADRO)(?=\w)|(?<=GEFORCE)(?=\w)"
    r"|(?<=[RG]TX)(?=\d)|(?<=\d)(?=TI(?![A-Z])|SUPER|SXM|PCIE)|(?<=\dTI)(?=\d)"
)
"""Where a name that is written without spaces, such as RTX2080TI, has one in CUDA's list."""

_FIRST_WITH_BF16 = 8.0


def precision_for(requested: Literal["auto"] | Precision, device: Device) -> RunPrecision:
    """The precision that was requested; by default bf16 on a GPU that supports it, fp16 on one that does not,
    and fp32 on a CPU."""
    if requested != "auto":
        return "fp32" if requested == "no" else requested
    if device.kind == "cpu":
        return "fp32"
    return "bf16" if _is_ampere_or_later(device) else "fp16"


def _is_ampere_or_later(device: Device) -> bool:
    """Whether a GPU has bf16 and flash attention."""
    if device.compute_capability is not None:
        return device.compute_capability >= _FIRST_WITH_BF16
    if (sheet := similar_data_sheet(device.name)) is not None:
        return sheet.has_bf16
    name = re.sub(r"[-_]", " ", device.name.upper())
    return _WITHOUT_BF16.search(_JOINED.sub(" ", name)) is None


def least_capable(devices: Sequence[Device]) -> Device:
    """The device whose recipe all of them can follow: ranks compute in one precision, so that a GPU without
    bf16, if there is one among them, decides for all. The first one otherwise."""
    without = (device for device in devices if device.kind == "cuda" and not _is_ampere_or_later(device))
    return next(without, devices[0])


def make_recipe(
    device: Device,
    precision: Literal["auto"] | Precision,
    optimizer: OptimizerName,
    method: MethodSpec,
    **options: Any,
) -> Recipe:
    """The recipe of a step on a device.

    Args:
        options: other fields of `Recipe`; the rest keep its defaults, which are those of a request.
    """
    return Recipe(
        device=device.kind,
        precision=precision_for(precision, device),
        optimizer=optimizer,
        lora=method.lora,
        quantised=method.name == "qlora",
        flash_attention=device.kind == "cpu" or _is_ampere_or_later(device),
        expandable_segments=device.expandable_segments,
        context_bytes=device.context_bytes,
        **{"direct_sums": device.kind == "cpu", **options},
    )


def recipe_of(spec: Spec, device: Device) -> Recipe:
    """The recipe of a spec's step on a device."""
    return make_recipe(
        device,
        spec.precision,
        spec.optimizer.name,
        spec.method,
        gradient_checkpointing=spec.gradient_checkpointing,
        attention=_attention(spec, device),
        momentum=spec.optimizer.name == "sgd" and bool(spec.optimizer.momentum),
        freeze=spec.freeze,
        packing=spec.data.packing,
        label_smoothing=spec.label_smoothing > 0,
        aux_scope=spec.aux_scope,
        clips=spec.gradient_clipping is not None,
        accumulate_in_fp32=spec.accumulate_in_fp32,
        accumulate_on_cpu=spec.accumulate_gradients_on_cpu,
        optimizer_on_cpu=spec.use_cpu_offload and device.kind == "cuda",
        direct_sums=device.kind == "cpu" and not spec.compile,
        compile=spec.compile,
        scores=len(spec.scores),
    )


def _attention(spec: Spec, device: Device) -> Attention:
    """The attention whose memory a step takes: deterministic attention in fp32 holds all scores on a GPU, as
    eager attention does (workers/training/kernels/attention.py)."""
    wide = precision_for(spec.precision, device) in ("fp32", "tf32")
    return "eager" if spec.deterministic and device.kind == "cuda" and wide else spec.attention


def unsupported_on(device: Literal["cpu", "cuda"], spec: Spec) -> dict[str, str]:
    """Why a device cannot make the steps of a spec, by the field that requires it; empty if it can."""
    return unsupported(
        device,
        quantised=spec.method.name == "qlora",
        optimizer=spec.optimizer.name,
        attention=spec.attention,
    )


def unsupported(
    device: Literal["cpu", "cuda"], *, quantised: bool, optimizer: str, attention: str = "sdpa"
) -> dict[str, str]:
    """Why a device cannot make such a step, by the field that requires it; empty if it can."""
    if device != "cpu":
        return {}
    needs_gpu = {
        "method": "qlora" if quantised else None,
        "optimizer": optimizer if optimizer == "adamw_8bit" else None,
        "attention": attention if attention == "flash_attention_2" else None,
    }
    return {
        field: f"{name} needs an NVIDIA GPU, and no worker here has one: the job would fail"
        for field, name in needs_gpu.items()
        if name is not None
    }
