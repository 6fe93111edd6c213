"""Makes a base model's files safe to load: stages them in a folder whose configurations name no other files,
and whose links lead only to the model's own files.

A model's files are untrusted, but loaders follow them: a tokenizer's configuration may name any file of the
machine as its vocabulary, an index may name weights elsewhere, and a link may point anywhere. So a model is
never loaded from its original folder, but from one with links to its regular files, and with configurations
that contain only fields known to be harmless.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.contract.model_fingerprint import TEMPLATES
from workers.training.exceptions import CannotTrain

MAX_JSON_BYTES = 2**24
"""Also the maximum of a chat template."""
MAX_TOKENIZER_BYTES = 256 * 2**20

_WEIGHTS = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_TEMPLATE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.jinja$")
_MOST_TEMPLATES = 20

_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Sets of files from which a tokenizer can be read, always in the model's own folder; one set is enough."""

_LINKED = (
    "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip

_SPECIAL_TOKENS = frozenset({
    "additional_special_tokens", "bos_token", "cls_token", "eos_token", "extra_special_tokens", "mask_token",
    "pad_token", "sep_token", "unk_token",
})  # fmt: skip
"""Fields of special_tokens_map.json that are kept. Others would become arguments of the tokenizer's class,
too."""

_TOKENIZER_FIELDS = frozenset({
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder",
    "additional_special_tokens", "bos_token", "byte_fallback", "chat_template",
    "clean_up_tokenization_spaces", "cls_token", "do_lower_case", "eos_token", "errors",
    "extra_special_tokens", "legacy", "mask_token", "model_max_length", "pad_token", "padding_side",
    "sep_token", "spaces_between_special_tokens", "split_special_tokens", "strip_accents",
    "tokenizer_class", "truncation_side", "unk_token", "use_default_system_prompt",
})  # fmt: skip
"""Fields of tokenizer_config.json that are kept. Any other becomes an argument of the tokenizer's class,
where it may name a file (`vocab`, `merges`, `vocab_file`, `init_inputs`)."""

_FORBIDDEN_FIELDS = frozenset({
    "attn_implementation", "auto_map", "backbone", "backbone_config", "experts_implementation",
    "init_inputs", "merges", "output_attentions", "output_hidden_states", "return_dict",
    "transformers_weights", "use_return_dict", "vocab",
})  # fmt: skip
_NAMES_A_FILE = re.compile(r"(^_|_(file|files|path|dir|folder|name_or_path|implementation)$)")
"""Fields of config.json that name files, or that override the job's explicit settings."""

_GENERATION_FIELDS = frozenset({
    "bos_token_id", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_p", "pad_token_id",
    "repetition_penalty", "temperature", "top_k", "top_p", "transformers_version",
})  # fmt: skip


def stage(source: Path, target: Path) -> Path:
    """Makes the safe copy of a model's folder; weights and vocabularies are linked, not copied.

    Args:
        source: the model's folder, or a snapshot in the hub's cache.
        target: the folder to create; an existing one is replaced.

    Raises:
        CannotTrain: a file links to outside of the folder, is too large, or has the wrong format.
        OSError: the folder does not exist.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    config = _json(source, "config.json")
    if config is None:
        raise FileNotFoundError(f"{source} holds no config.json")
    if config.get("quantization_config") is not None:
        raise CannotTrain(
            "model_not_loaded", "the model's weights are quantized already: choose the unquantized model"
        )
    (target / "config.json").write_text(json.dumps(_without_paths(config)))
    tokenizer = _json(source, "tokenizer_config.json")
    if tokenizer is not None:
        kept = {name: value for name, value in tokenizer.items() if name in _TOKENIZER_FIELDS}
        (target / "tokenizer_config.json").write_text(json.dumps(kept))
    for name, fields in (
        ("generation_config.json", _GENERATION_FIELDS), ("special_tokens_map.json", _SPECIAL_TOKENS),
    ):  # fmt: skip
        if (content := _json(source, name)) is not None:
            kept = {field: value for field, value in content.items() if field in fields}
            (target / name).write_text(json.dumps(kept))
    added = _json(source, "added_tokens.json")
    if added is not None:
        numbers = {token: number for token, number in added.items() if type(number) is int}
        (target / "added_tokens.json").write_text(json.dumps(numbers))
    for name in _LINKED:
        _link(source, target, name, MAX_TOKENIZER_BYTES)
    for name in _weights(source):
        _link(source, target, name)
    for name in sorted(path.name for path in (source / TEMPLATES).glob("*.jinja"))[:_MOST_TEMPLATES]:
        if _TEMPLATE.fullmatch(name):
            (target / TEMPLATES).mkdir(exist_ok=True)
            _link(source, target, f"{TEMPLATES}/{name}", MAX_JSON_BYTES)
    return target


def check_tokenizer(folder: Path) -> None:
    """Checks that the folder contains a vocabulary in a supported format.

    Raises:
        CannotTrain: it contains none.
    """
    if not any(all((folder / name).exists() for name in names) for names in _VOCABULARIES):
        raise CannotTrain(
            "model_not_loaded",
            "the model's folder has no tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model: "
            "put its tokenizer beside its weights",
        )


def weight_files(folder: Path) -> list[Path]:
    """The files of a staged folder from which transformers reads the weights: one, or those of the index."""
    whole, index = folder / _WHOLE, folder / _INDEX  # which was checked when it was staged
    if whole.is_file() or not index.exists():
        return [whole] if whole.is_file() else []
    names = set(json.loads(index.read_bytes())["weight_map"].values())
    return sorted(folder / name for name in names if (folder / name).is_file())


def _weights(source: Path) -> Iterator[str]:
    """The names of the weights' files, and of the index if there is one. All are plain file names."""
    index = _json(source, _INDEX)
    names = {path.name for path in source.glob("*.safetensors")}
    if index is not None:
        named = index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
            raise CannotTrain("model_not_loaded", f"{_INDEX} has no weight_map from weights to files")
        outside = sorted({each for each in named.values() if not _WEIGHTS.fullmatch(each)})
        if outside:
            raise CannotTrain(
                "model_not_loaded",
                f"weight_map of {_INDEX} must name files of the model's own folder, not {outside[0]!r}",
            )
        names |= set(named.values())
        yield _INDEX
    yield from sorted(name for name in names if _WEIGHTS.fullmatch(name))


def _link(source: Path, target: Path, name: str, most_bytes: int | None = None) -> None:
    """Links to one of the folder's own files, if it exists."""
    found = _own(source, name)
    if found is None:
        return
    if most_bytes is not None and found.stat().st_size > most_bytes:
        raise CannotTrain("model_not_loaded", f"{name} of the model is larger than {most_bytes} bytes")
    (target / name).symlink_to(found)


def _own(source: Path, name: str) -> Path | None:
    """The real path of a file in the folder, or None if it does not exist.

    Raises:
        CannotTrain: it is a link out of the folder (for a snapshot, out of the repository's cache).
    """
    path = source / name
    if not path.is_file():
        return None
    real = path.resolve()
    home = _home(source)
    if not real.is_relative_to(home):
        raise CannotTrain(
            "model_not_loaded",
            f"{name} of the model is a link that leads out of its folder: copy the file itself there",
        )
    return real


def _home(source: Path) -> Path:
    """Where links may point: into the folder itself or, for a snapshot, into its repository in the hub's
    cache."""
    real = source.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real


def _json(source: Path, name: str) -> dict[str, Any] | None:
    """The content of a small JSON object, or None if the file does not exist."""
    path = _own(source, name)
    if path is None:
        return None
    most = MAX_TOKENIZER_BYTES if name == _INDEX else MAX_JSON_BYTES
    if path.stat().st_size > most:
        raise CannotTrain("model_not_loaded", f"{name} of the model is larger than {most} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CannotTrain("model_not_loaded", f"{name} of the model is not valid JSON") from None
    if not isinstance(content, dict):
        raise CannotTrain("model_not_loaded", f"{name} of the model is not a JSON object")
    return content


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without the fields that name files or override what the job says; nested ones too."""
    return {
        name: _without_paths(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _FORBIDDEN_FIELDS and not _NAMES_A_FILE.search(name)
    }
