"""Loading a base model, preparing it for training, and saving it where from_pretrained finds it."""

import contextlib
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from app.schemas.spec import Order, Plan, Spec
from workers.run_directory import sync
from workers.training.faults import CannotTrain
from workers.training.tiny_gpt2 import ensure_tiny_gpt2

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load(order: Order) -> tuple[Any, Any]:
    """The model, in fp32 and in training mode, and its tokenizer. Only safetensors, never code.

    Raises:
        CannotTrain: files that are missing, cannot be fetched, or hold no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if order.spec.model.source == "built_in":
        ensure_tiny_gpt2(Path(order.model_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(order.model_path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            order.model_path,
            dtype=torch.float32,
            attn_implementation=order.spec.attention,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise CannotTrain(
            "model_not_loaded",
            f"the model {order.spec.model.name} could not be loaded: {_without_paths(error, order)}",
        ) from error
    return _trainable(model, order.spec), tokenizer


def _trainable(model: Any, spec: Spec) -> Any:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and spec.data.max_length > positions:
        raise CannotTrain(
            "max_length",
            f"max_length {spec.data.max_length} is longer than {spec.model.name}'s {positions} positions",
        )
    # Padding lies to the right, out of causal attention's sight. Looking for it would read from the device.
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    if spec.gradient_checkpointing:
        # The name since transformers 5.2x; releases before it have only the older one.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    _freeze(model, spec.freeze)
    return model.train()


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
        raise CannotTrain("freeze", "freeze leaves nothing to train")


def device_of(plan: Plan) -> torch.device:
    """The device of a plan; on a GPU the memory limit is enforced from here on."""
    if plan.device == "cpu":
        if plan.threads:
            torch.set_num_threads(plan.threads)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotTrain(
            "no_cuda",
            "nvidia-smi shows a GPU, but this torch cannot use it: install a CUDA build of torch, or hide "
            "the GPU from the worker with CUDA_VISIBLE_DEVICES= to train on the CPU",
        )
    device = torch.device("cuda", 0)  # the supervisor shows a trainer only its own GPU
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, plan.devices[0].memory_limit_bytes / total), device)
    return device


def autocast(plan: Plan) -> Any:
    """The context of a forward pass in the plan's precision."""
    if plan.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(plan.device, dtype=AUTOCAST[plan.precision])


def save(model: Any, tokenizer: Any, target: Path) -> tuple[str, ...]:
    """Writes the model as a whole or not at all; gives the names of its files."""
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in (*partial.iterdir(), partial):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync(target.parent)
    return tuple(sorted(file.name for file in target.iterdir()))


def _without_paths(error: Exception, order: Order) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return first.replace(order.model_path, order.spec.model.name)
