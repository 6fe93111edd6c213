"""Loads a base model and its tokenizer from files that were checked and staged first."""

import contextlib
import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from app.contract.assignment import Assignment
from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import ModelReference
from app.contract.plan import Plan
from app.contract.spec import Spec
from workers.run_directory import RunDirectory, write_atomically
from workers.training.devices import device_errors
from workers.training.exceptions import CannotTrain
from workers.training.models.auto_class import auto_class
from workers.training.models.fetching import fetch, why_not_loaded
from workers.training.models.head import backbone_of
from workers.training.models.model_files import check_tokenizer, stage, weight_files
from workers.training.models.model_parts import padding_token, positions_of
from workers.training.models.precision import AUTOCAST
from workers.training.models.saving import keep_weights
from workers.training.models.score_head import (
    LANGUAGE_HEADS,
    SavedHead,
    ScoreHead,
    arrange,
    configure,
    initialise,
    score_layer_of,
    scores_sequences,
    set_padding_token,
)
from workers.training.models.trainable import prepare_for_training
from workers.training.models.trained_weights import (
    check_layers,
    continue_adapters,
    layers_below,
    layers_of,
    names_of_continued,
    with_layers,
)
from workers.training.processes.limits import limited_memory

_COMPILED_SHAPES = 64
_SHOWN_WEIGHTS = 10
_SHOWN_UNUSED = 3
_SHOWN_CLASSES = 5
_CONFIG_BYTES = 2**30


def prepare_files(model: ModelReference, path: str, target: Path) -> Path:
    """Downloads a model's files if necessary, checks them, and stages them in a folder that is safe to load
    from.

    Args:
        path: a folder, or a name on the hub.
        target: where the staged folder goes.

    Raises:
        CannotTrain: the files are not those that the job was submitted with, or are not safe to load.
        OSError, ValueError: the files cannot be fetched.
    """
    source = fetch(model, path)
    if model.fingerprint is not None and fingerprint_of_files(source) != model.fingerprint:
        raise CannotTrain(
            "model_changed",
            f"the files of the model {model.name} have been deleted, or changed since the job was "
            "submitted: put them back, or submit a new job",
        )
    return stage(source, target)


def stage_base_model(assignment: Assignment, run: RunDirectory) -> Path:
    """Runs `prepare_files` for a run, and checks that every attempt uses the same files.

    Raises:
        CannotTrain: the files cannot be fetched, are not safe to load, or changed since the first attempt or,
            for what earlier jobs trained, since the submission.
    """
    try:
        folder = prepare_files(assignment.spec.model, assignment.model_path, run.base)
    except (OSError, ValueError, ImportError) as error:
        raise CannotTrain(
            "model_not_loaded",
            f"the model {assignment.spec.model.name} could not be loaded: "
            f"{why_not_loaded(error, assignment, run.base)}",
        ) from error
    check_layers(layers_of(assignment))
    known, found = run.path / "base_model.json", fingerprint_of_files(folder)
    if known.exists() and _fingerprint_in(known) != found:
        raise CannotTrain(
            "model_changed",
            f"the files of the model {assignment.spec.model.name} changed since the job's first "
            "attempt: put them "
            "back, or submit a new job",
        )
    write_atomically(known, json.dumps({"name": assignment.spec.model.name, "fingerprint": found}))
    return folder


def _fingerprint_in(known: Path) -> str | None:
    """The fingerprint that an earlier attempt stored; None if the file is damaged."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(known.read_bytes())["fingerprint"])
    return None


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
        folder: the folder of the staged files (`prepare_files`).

    Raises:
        CannotTrain: files are missing, cannot be read, or contain no causal language model; a package is not
            installed; or the adapters or `freeze` do not fit the model.
    """
    try:
        check_config(folder)
        tokenizer = load_tokenizer(folder)
        quantised = {}
        if assignment.spec.method.name == "qlora":
            quantised = {
                "quantization_config": _four_bits(assignment.plan),
                "device_map": {"": assignment.plan.device},
            }
        dtype = torch.bfloat16 if assignment.plan.precision == "pure_bf16" else torch.float32
        head = score_head_of(assignment.spec)
        model, notes = read_model(
            assignment.spec.model.name,
            folder,
            attention=assignment.spec.attention,
            dtype=dtype,
            head=head,
            **quantised,
        )
        if head is not None:
            set_padding_token(model.config, padding_token(tokenizer, model))
    except ImportError as error:
        raise CannotTrain("not_installed", why_not_loaded(error, assignment, folder)) from error
    except (
        OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, SafetensorError,
        ArithmeticError, AssertionError, StrictDataclassError, RuntimeError,
    ) as error:  # fmt: skip
        if isinstance(error, RuntimeError) and device_errors.is_transient(error):
            raise
        raise CannotTrain(
            "model_not_loaded",
            f"the model {assignment.spec.model.name} could not be loaded: "
            f"{why_not_loaded(error, assignment, folder)}",
        ) from error
    with warnings.catch_warnings(record=True) as warned:  # warnings of peft, which users should see
        warnings.simplefilter("always", UserWarning)
        _check_positions(model, assignment.spec)
        model = with_layers(model, layers_below(assignment))
        model = prepare_for_training(
            model,
            lora=assignment.spec.method.lora,
            seed=assignment.spec.seed,
            gradient_checkpointing=assignment.spec.gradient_checkpointing,
            freeze=assignment.spec.freeze,
            precision=assignment.plan.precision,
            saved=names_of_continued(assignment),
        )
        continue_adapters(model, assignment)
    if assignment.spec.compile:
        _check_compiler()
        torch._dynamo.config.recompile_limit = _COMPILED_SHAPES
        backbone_of(model).compile(dynamic=False)
    shown = [each for each in warned if issubclass(each.category, UserWarning)]  # others are for programmers
    return model, tokenizer, notes + [str(warning.message).splitlines()[0] for warning in shown]


def score_head_of(spec: Spec) -> ScoreHead | None:
    """The head that scores whole sequences; None if the job trains a language model."""
    return ScoreHead(spec.scores, spec.seed) if spec.scores else None


def check_config(folder: Path) -> None:
    """Reads config.json with little memory: some configurations expand a few numbers into a list.

    Raises:
        CannotTrain: reading it takes more memory than that.
    """
    from transformers import AutoConfig

    try:
        with limited_memory(_CONFIG_BYTES):
            AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except MemoryError:
        raise CannotTrain(
            "model_not_loaded",
            f"the model's config.json takes more than {_CONFIG_BYTES // 2**20} MiB of memory to read",
        ) from None


def read_model(
    name: str,
    folder: Path,
    *,
    attention: str,
    dtype: torch.dtype | str,
    head: ScoreHead | None = None,
    **options: Any,
) -> tuple[Any, list[str]]:
    """The model in a staged folder, and notes on weights that are not used, and on its attention.

    Args:
        name: the model's name, for messages.
        attention: if it is sdpa, and the model has none, eager is used.
        dtype: of the weights in memory; "auto": as they are stored.
        head: what the model's head scores; it is new unless the files hold the same. None: a language model.
        options: further arguments for transformers' `from_pretrained`.

    Raises:
        CannotTrain: weights are missing, quantized, or of another shape.
        ValueError: the files cannot be read (and other errors, as transformers raises them).
    """
    try:
        return _read(name, folder, attention, dtype, head, options)
    except ValueError as error:
        if attention != "sdpa" or "attention" not in str(error):
            raise
    model, notes = _read(name, folder, "eager", dtype, head, options)
    return model, ["the model has no sdpa attention: eager is used", *notes]


def _read(
    name: str,
    folder: Path,
    attention: str,
    dtype: torch.dtype | str,
    head: ScoreHead | None,
    options: dict[str, Any],
) -> tuple[Any, list[str]]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    keep_weights(config)
    if head is None and scores_sequences(config):
        raise CannotTrain(
            "not_supported",
            f"{name} is a classifier or a reward model, which predicts no tokens: choose a language model",
        )
    in_files = None if head is None else configure(config, head)
    loaded: Any = auto_class(config, scores=head is not None).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below, with those that are missing
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    model, found = loaded
    notes: list[str] = []
    if head is not None and in_files is not None:
        found, notes = _with_head(model, head, found, in_files)
    _check_weights(name, found)
    _check_kinds(folder, model, found)
    return model, [*notes, *_unused(found)]


def _with_head(
    model: Any, head: ScoreHead, found: dict[str, Any], in_files: SavedHead
) -> tuple[dict[str, Any], list[str]]:
    """Initialises the head, unless the files hold it. Returns what was found in them, apart from heads, and a
    note if they hold another one."""
    layer = score_layer_of(model)
    own = {name for name, module in model.named_modules() if module is layer}
    names = {f"{each}.{kind}" for each in own for kind in ("weight", "bias")}
    lacks = names & set(map(str, found.get("missing_keys") or ()))
    notes = []
    if layer is not None and in_files.order is not None and not lacks:
        arrange(layer, in_files.order)
    elif layer is not None:
        initialise(layer, model.config, head.seed)
        if in_files.names:
            old, new = (", ".join(each[:_SHOWN_CLASSES]) for each in (in_files.names, head.names))
            notes.append(
                f"the layer that scores texts is new, since the model has other scores ({old}) than {new}"
            )

    def others(kind: str, left_out: Collection[str]) -> list[Any]:
        listed = found.get(kind) or ()
        return [each for each in listed if (each[0] if isinstance(each, tuple) else each) not in left_out]

    rest = {
        **found,
        "missing_keys": others("missing_keys", names),
        "mismatched_keys": others("mismatched_keys", names),
        "unexpected_keys": others("unexpected_keys", LANGUAGE_HEADS),
    }
    return rest, notes


def _unused(found: dict[str, Any]) -> list[str]:
    names = sorted(map(str, found.get("unexpected_keys") or ()))
    if not names:
        return []
    some = ", ".join(names[:_SHOWN_UNUSED]) + (", …" if len(names) > _SHOWN_UNUSED else "")
    return [f"{len(names)} weights in the files are not part of the model, and are left out: {some}"]


def _check_kinds(folder: Path, model: Any, found: dict[str, Any]) -> None:
    """Checks that the weights are plain floating-point numbers. Numbers in 8 bits, whose scales are kept
    beside them, would be read without their scales.

    Raises:
        CannotTrain: they are not.
    """
    from safetensors import safe_open

    kinds: dict[str, str] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as weights:
            kinds |= {name: str(weights.get_slice(name).get_dtype()) for name in weights.keys()}  # noqa: SIM118  # it is no dict
    unused = set(map(str, found.get("unexpected_keys") or ()))
    used = {name: kind for name, kind in kinds.items() if name not in unused}
    of_buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    wrong = [
        name for name, kind in used.items()
        if kind not in _FLOATS and (kind.startswith("F") or name.rpartition(".")[2] not in of_buffers)
    ]  # fmt: skip
    scaled = [name for name in used for suffix in _SCALES if f"{name}{suffix}" in unused]
    if wrong or scaled:
        name = (wrong or scaled)[0]
        why = f"is {kinds[name]}" if wrong else "has a scale beside it"
        raise CannotTrain(
            "model_not_loaded",
            f"the model's weights are quantized ({name} {why}), although config.json does not say how: "
            "choose the unquantized model",
        )


_FLOATS = {"F64", "F32", "F16", "BF16"}
_SCALES = ("_scale", "_scale_inv", ".scale", ".absmax")
"""What the names of scales append to those of the weights that need them."""


def _check_weights(model: str, found: dict[str, Any]) -> None:
    """Checks that every weight comes from the files, since others would be initialised at random. Tied
    weights, which are stored only once, are not reported as missing.

    Raises:
        CannotTrain: weights are missing, or of another shape; the message lists some of them.
    """
    mismatched = [each[0] if isinstance(each, tuple) else each for each in found.get("mismatched_keys") or ()]
    missing = "are missing from", "provide the complete model", found.get("missing_keys") or ()
    other = (
        "have shapes that differ from config.json in",
        "provide files that belong together",
        mismatched,
    )
    for problem, remedy, names in (missing, other):
        if names:
            some = ", ".join(sorted(map(str, names))[:_SHOWN_WEIGHTS])
            more = f" and {len(names) - _SHOWN_WEIGHTS} more" if len(names) > _SHOWN_WEIGHTS else ""
            raise CannotTrain(
                "model_not_loaded",
                f"{len(names)} weights {problem} the files of {model}: {some}{more}. "
                f"They would be initialised at random: {remedy}",
            )
    if found.get("error_msgs"):
        raise CannotTrain("model_not_loaded", f"the weights of {model} could not be read completely")


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


def _check_positions(model: Any, spec: Spec) -> None:
    positions = positions_of(model)
    if positions is not None and positions < spec.data.max_length:
        raise CannotTrain(
            "max_length",
            f"max_length {spec.data.max_length} is longer than {spec.model.name}'s context of {positions} "
            "tokens",
        )


def _check_compiler() -> None:
    """Checks for a C++ compiler: torch.compile needs one on a CPU, and on a GPU to build its kernel
    launchers."""
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise CannotTrain(
            "no_compiler", "compile needs a C++ compiler: install g++, or leave training_config.compile out"
        )
