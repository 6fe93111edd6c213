"""Loading a base model, preparing it for training, and saving it where from_pretrained finds it."""

import contextlib
import importlib.util
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from app.contract.architecture import ModelReference
from app.contract.assignment import Assignment
from app.contract.model_files import fingerprint_of_files
from app.contract.plan import Plan
from app.contract.spec import LoraSpec, MethodSpec, RunPrecision, Spec
from workers.run_directory import RunDirectory, sync, write_whole
from workers.training.exceptions import CannotTrain
from workers.training.fetching import fetch, first_line
from workers.training.loss import backbone_of
from workers.training.model_files import check_tokenizer, stage

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

TOLERANCE = {"fp32": 1e-5, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2, "pure_bf16": 2e-2}
"""How far two ways to compute the same may differ, relatively, by precision."""

_COMPILED_SHAPES = 64
_SHOWN_WEIGHTS = 10


def prepare_files(model: ModelReference, path: str, target: Path) -> Path:
    """A folder from which the model can be loaded safely: downloaded where it must be, checked, and staged.

    Args:
        path: a folder, or a name on the hub.
        target: where the staged folder goes.

    Raises:
        CannotTrain: the files are not those that the job was submitted with, or are not safe to load.
        OSError, ValueError: there are none.
    """
    source = fetch(model, path)
    if model.fingerprint is not None and fingerprint_of_files(source) != model.fingerprint:
        raise CannotTrain(
            "model_changed",
            f"the files of the model {model.name} are no longer those that the job was submitted with: put "
            "them back, or submit anew",
        )
    return stage(source, target)


def staged(assignment: Assignment, run: RunDirectory) -> Path:
    """`prepare_files` for a run, which trains from the same files in each of its attempts.

    Raises:
        CannotTrain: the files cannot be had, are not safe to load, or changed since the first attempt.
    """
    try:
        folder = prepare_files(assignment.spec.model, assignment.model_path, run.base)
    except (OSError, ValueError, ImportError) as error:
        raise CannotTrain(
            "model_not_loaded",
            f"the model {assignment.spec.model.name} could not be loaded: "
            f"{first_line(error, assignment, run.base)}",
        ) from error
    known, found = run.path / "base_model.json", fingerprint_of_files(folder)
    if known.exists() and json.loads(known.read_text())["fingerprint"] != found:
        raise CannotTrain(
            "model_changed",
            f"the files of the model {assignment.spec.model.name} changed since the job's first "
            "attempt: put them "
            "back, or submit anew",
        )
    write_whole(known, json.dumps({"name": assignment.spec.model.name, "fingerprint": found}))
    return folder


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a staged folder.

    Raises:
        CannotTrain: there is no vocabulary in it.
        OSError, ValueError, ImportError: it cannot be read, or needs code of its own.
    """
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_tokenizer(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # malformed files raise anything, and native code panics
        raise CannotTrain(
            "model_not_loaded", f"the model's tokenizer could not be loaded ({type(error).__name__})"
        ) from None


def load(assignment: Assignment, folder: Path) -> tuple[Any, Any, list[str]]:
    """The model in training mode, its tokenizer, and notes on what differs from the request.

    Only safetensors, never code. Weights are in fp32, or under pure_bf16 in bf16, or under QLoRA in 4 bits.

    Args:
        folder: of the staged files (`prepare_files`).

    Raises:
        CannotTrain: files that are missing, cannot be fetched, or hold no causal language model; a package
            that is not installed.
    """
    try:
        tokenizer = load_tokenizer(folder)
        try:
            model, notes = _read(assignment, folder, assignment.spec.attention), []
        except ValueError as error:
            if assignment.spec.attention != "sdpa" or "attention" not in str(error):
                raise
            model, notes = (
                _read(assignment, folder, "eager"),
                ["the model has no sdpa attention: eager is used"],
            )
    except ImportError as error:
        raise CannotTrain("not_installed", first_line(error, assignment, folder)) from error
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CannotTrain(
            "model_not_loaded",
            f"the model {assignment.spec.model.name} could not be loaded: "
            f"{first_line(error, assignment, folder)}",
        ) from error
    with warnings.catch_warnings(record=True) as warned:  # peft's, which a person should see
        _check_positions(model, assignment.spec)
        model = trainable(
            model,
            lora=assignment.spec.method.lora,
            seed=assignment.spec.seed,
            gradient_checkpointing=assignment.spec.gradient_checkpointing,
            freeze=assignment.spec.freeze,
            precision=assignment.plan.precision,
        )
    if assignment.spec.compile:
        _check_compiler()
        torch._dynamo.config.recompile_limit = _COMPILED_SHAPES
        backbone_of(model).compile(dynamic=False)
    told = [each for each in warned if issubclass(each.category, UserWarning)]  # others are for programmers
    return model, tokenizer, notes + [str(warning.message).splitlines()[0] for warning in told]


def _read(assignment: Assignment, folder: Path, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    quantised = {}
    if assignment.spec.method.name == "qlora":
        quantised = {
            "quantization_config": _four_bits(assignment.plan),
            "device_map": {"": assignment.plan.device},
        }
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if assignment.plan.precision == "pure_bf16" else torch.float32,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, with those that are missing
        local_files_only=True,
        output_loading_info=True,
        **quantised,
    )
    model, found = loaded
    _check_weights(assignment, found)
    return model


def _check_weights(assignment: Assignment, found: dict[str, Any]) -> None:
    """Every weight must come from the files: others would be initialised at random. Tied weights, which are
    stored once, are not among those reported.

    Raises:
        CannotTrain: weights are missing, or of another shape; the message lists some of them.
    """
    mismatched = [each[0] if isinstance(each, tuple) else each for each in found.get("mismatched_keys") or ()]
    for what, names in (("are missing from", found.get("missing_keys") or ()), ("do not fit", mismatched)):
        if names:
            some = ", ".join(sorted(map(str, names))[:_SHOWN_WEIGHTS])
            more = f" and {len(names) - _SHOWN_WEIGHTS} more" if len(names) > _SHOWN_WEIGHTS else ""
            raise CannotTrain(
                "model_not_loaded",
                f"{len(names)} weights {what} the files of {assignment.spec.model.name}: {some}{more}. "
                "They would "
                "be initialised at random: provide the complete model",
            )
    if found.get("error_msgs"):
        raise CannotTrain(
            "model_not_loaded", f"the weights of {assignment.spec.model.name} could not be read as a whole"
        )


def _four_bits(plan: Plan) -> Any:
    """QLoRA's weights (Dettmers et al. 2023): NF4, with the scales quantised again."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CannotTrain(
            "not_installed", "qlora needs the package bitsandbytes: pip install bitsandbytes, or choose lora"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=AUTOCAST.get(plan.precision, torch.bfloat16),
    )


def trainable(
    model: Any,
    *,
    lora: LoraSpec | None,
    seed: int,
    gradient_checkpointing: bool,
    freeze: tuple[str, ...],
    precision: RunPrecision,
) -> Any:
    """Prepares a loaded model for training: adapters, gradient checkpointing, frozen parameters, precision.

    Raises:
        CannotTrain: adapters or patterns that match nothing.
    """
    # Padding lies to the right, out of causal attention's sight. Looking for it would read from the device.
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    if lora is not None:
        model = with_adapters(model, lora, seed)
    if gradient_checkpointing:
        recompute_activations(model)
    _freeze(model, freeze)
    if precision in AUTOCAST and lora is not None and not lora.merge:
        _narrow_frozen_layers(model, AUTOCAST[precision])
    return model.train()


def _narrow_frozen_layers(model: Any, dtype: torch.dtype) -> None:
    """Keeps frozen linear layers in autocast's precision, to which it would cast them each time: the same
    numbers, half the memory. A weight that another layer shares, as an output head its embedding's, stays."""
    from transformers.pytorch_utils import Conv1D

    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        plain = isinstance(module, (torch.nn.Linear, Conv1D)) and all(p.is_floating_point() for p in own)
        if plain and own and not any(p.requires_grad or owners[id(p)] > 1 for p in own):
            module.to(dtype)


def _check_positions(model: Any, spec: Spec) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and spec.data.max_length > positions:
        raise CannotTrain(
            "max_length",
            f"max_length {spec.data.max_length} is longer than {spec.model.name}'s {positions} positions",
        )


def _check_compiler() -> None:
    """torch.compile writes C++ for a CPU, and on a GPU for what starts its kernels."""
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise CannotTrain(
            "no_compiler", "compile needs a C++ compiler: install g++, or leave training_config.compile out"
        )


def with_adapters(model: Any, lora: LoraSpec, seed: int) -> Any:
    """The model with low-rank adapters, which alone are trained; the seed fixes what they begin with."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) if lora.target_modules else "all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's layers
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return get_peft_model(model, config)
    except ValueError as error:
        raise CannotTrain("lora", f"lora: {str(error).splitlines()[0]}") from error


def recompute_activations(model: Any) -> None:
    """Gradient checkpointing: activations are made again in the backward; the gradient is the same."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # The name since transformers 5.2x; releases before it have only the older one.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextlib.contextmanager
def without_randomness(model: torch.nn.Module) -> Iterator[None]:
    """No dropout and no jitter inside; layers that recompute their activations go on doing so."""
    was = {module: module.training for module in model.modules()}
    recompute = {}
    for module in was:
        module.training = False
        if getattr(module, "gradient_checkpointing", False) and "_gradient_checkpointing_func" in vars(
            module
        ):
            # transformers asks a layer's `training` whether to recompute, and its forward whether to drop.
            module.training = was[module]
            recompute[module] = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = _quietly(module, module._gradient_checkpointing_func)
    try:
        yield
    finally:
        for module, function in recompute.items():
            module._gradient_checkpointing_func = function
        for module, training in was.items():
            module.training = training


def _quietly(layer: torch.nn.Module, checkpoint: Any) -> Any:
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


def layers_of(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """The trainable parameters by layer: each block of the model, and everything outside of the blocks."""
    layers: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = name.removeprefix("base_model.model.").split(".")
            numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            end = numbered + 1 if numbered is not None else max(1, len(parts) - 1)
            layers.setdefault(".".join(parts[:end]), []).append(parameter)
    return layers


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
    if plan.precision == "tf32":
        torch.set_float32_matmul_precision("high")
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
    torch.cuda.set_per_process_memory_fraction(min(1.0, plan.ranks[0].memory_limit_bytes / total), device)
    return device


def autocast(precision: RunPrecision, device: str) -> Any:
    """The context of a forward pass in a precision."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=AUTOCAST[precision])


def save(model: Any, tokenizer: Any, target: Path, method: MethodSpec, base: str) -> tuple[str, ...]:
    """Writes the model, or only its adapters, completely or not at all. Returns the names of the files.

    Merging adapters changes `model` itself.

    Args:
        base: the base model's name, which adapters refer to.
    """
    if method.lora is not None and method.lora.merge:
        model = model.merge_and_unload()
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if (adapters := partial / "adapter_config.json").exists():  # where peft has put a path of this machine
        adapters.write_text(
            json.dumps({**json.loads(adapters.read_text()), "base_model_name_or_path": base}, indent=2)
        )
    (partial / "README.md").unlink(missing_ok=True)  # peft's, a template that is not filled in
    for path in (*partial.iterdir(), partial):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync(target.parent)
    return tuple(sorted(file.name for file in target.iterdir()))


def routes(model: Any) -> bool:
    """Whether the model is a mixture of experts, in which rounding can decide near ties."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inner.config.get_text_config()
    return any(
        getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")
    )
