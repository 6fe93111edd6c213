"""Base models by name: built in, in the models folder, in the hub's cache, or on the hub."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from app.contract.architecture import BUILT_IN_MODEL, MODEL_NAME, Architecture
from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import ModelReference, split_revision
from app.contract.regular_files import read_regular
from app.contract.text import path_to_unstorable, size_error
from app.errors import Unprocessable
from app.models import hub
from app.models.hub import LARGEST_CONFIG_BYTES
from app.planning import architectures, catalogue
from app.planning.architectures import UnknownArchitecture
from app.settings import Settings
from app.storage import stored_files

Source = Literal["built_in", "local", "hub"]
KnownFrom = Literal["built_in", "local", "catalogue"]

_MOST_CONFIG_FIELDS = 20_000
"""Large, since some configs have one entry per class or per layer."""


@dataclass(frozen=True)
class PlannableModel:
    """A model for which jobs can be planned."""

    architecture: Architecture
    config: dict[str, Any]
    """The content of its config.json."""


def find_model(name: str, settings: Settings) -> tuple[ModelReference, PlannableModel]:
    """A base model to train. Its config.json is read here; the trainer downloads weights from the hub.

    Raises:
        Unprocessable: the model is unknown or not reachable, or its architecture is not supported.
    """
    if name == BUILT_IN_MODEL:
        return _built_in()
    source: Source = "local"
    config, commit = _local_config(name, settings), None
    if config is None:
        source, (config, commit) = "hub", _hub_config(name, settings)
    base = _read(name, config)
    folder = _local_folder(name, settings) if source == "local" else None
    return ModelReference(
        name=name,
        source=source,
        architecture=base.architecture,
        fingerprint=None if folder is None else _fingerprint(name, folder),
        revision=commit or split_revision(name)[1],
    ), base


_OTHER_WEIGHTS = re.compile(r"(pytorch_model|tf_model|flax_model|consolidated).*|.*\.gguf")
"""Names of files with weights in other formats than safetensors."""


def check_weights(name: str, settings: Settings) -> None:
    """Checks that the folder of a local model does not have its weights in other formats only.

    Raises:
        Unprocessable: it has.
    """
    folder = _local_folder(name, settings)
    names = sorted(path.name for path in folder.iterdir()) if folder is not None else []
    other = next(filter(_OTHER_WEIGHTS.fullmatch, names), None)
    if other is not None and not any(each.endswith(".safetensors") for each in names):
        raise Unprocessable(
            f"The folder of the model {name} has weights in {other}, but only safetensors are read: load the "
            "model with transformers, and save it with save_pretrained.",
            field="model_name",
        )


def _fingerprint(name: str, folder: Path) -> str:
    try:
        return fingerprint_of_files(folder)
    except OSError as error:
        raise Unprocessable(
            f"The files of the model {name} cannot be read ({error.strerror}).", field="model_name"
        ) from None


@cache
def _built_in() -> tuple[ModelReference, PlannableModel]:
    base = _read(BUILT_IN_MODEL, catalogue.TINY_GPT2)
    return ModelReference(name=BUILT_IN_MODEL, source="built_in", architecture=base.architecture), base


def find_for_planning(name: str, settings: Settings) -> PlannableModel:
    """A model's sizes; a model in the catalogue needs no files. Neither does a tuned variant of one: if its
    config.json cannot be read from here, it gets the sizes of its base, as estimates.

    Raises:
        Unprocessable: as in `find_model`.
    """
    config = _local_config(name, settings) or catalogue.config_of(name)
    if config is not None:
        return _read(name, config)
    try:
        return find_model(name, settings)[1]
    except hub.NotReadable:
        plain, revision = split_revision(name)
        base = catalogue.pretrained_base_of(plain) if revision is None else None
        config = catalogue.config_of(base) if base is not None else None
        if config is None:
            raise
        found = _read(name, config)
        architecture = found.architecture.model_copy(update={"is_estimated": True})
        return replace(found, architecture=architecture)


def full_name(name: str, settings: Settings) -> str:
    """The name under which other tools find a model: for a short name of the catalogue, its id on the hub."""
    return name if _local_folder(name, settings) is not None else catalogue.ALIASES.get(name.lower(), name)


def path_of(model: ModelReference, settings: Settings) -> str:
    """Where a process on this machine finds a model's files: a folder, or a name on the hub.

    Raises:
        ValueError: the model is local, and ACCRUE_MODELS_DIR is not set for this process; or a job's folder
            is a link.
        Unavailable: the object storage that has a job's model cannot be used.
    """
    if model.source == "built_in":
        return str(settings.built_in_models_dir / model.base_name)
    if model.source == "hub":
        return split_revision(model.base_name)[0]
    if model.source == "job":
        return str(stored_files.folder_of_run(settings, str(model.job_id), "model"))
    if settings.models_dir is None:
        raise ValueError("ACCRUE_MODELS_DIR is not set for the worker")
    return str(settings.models_dir.absolute() / model.base_name)


def layer_paths(model: ModelReference, settings: Settings) -> tuple[str, ...]:
    """The folders of a model's layers.

    Raises:
        ValueError: one of them is a link.
        Unavailable: the object storage that has them cannot be used.
    """
    return tuple(
        str(stored_files.folder_of_run(settings, layer.job_id, *layer.folder.split("/")))
        for layer in model.layers
    )


def read_folder(name: str, folder: Path) -> PlannableModel:
    """A model in a folder that a job wrote; links are not followed.

    Raises:
        Unprocessable: there is none, or it cannot be planned for.
    """
    try:
        content = read_regular(folder, "config.json", max_bytes=LARGEST_CONFIG_BYTES)
    except OSError:
        content = None
    if content is None:
        raise Unprocessable(
            f"The model {name} has no config.json, which describes it: transformers writes "
            "one beside the weights.",
            field="model_name",
        )
    return _read(name, _parse(name, content))


def is_local(name: str, settings: Settings) -> bool:
    """Whether a model is found without the hub and its cache."""
    return name == BUILT_IN_MODEL or _local_folder(name, settings) is not None


def local_names(settings: Settings) -> list[str]:
    """Names that need no hub: the built-in model and those of the models folder."""
    folder = settings.models_dir
    local = (
        sorted(
            name
            for path in _configs(folder)
            if MODEL_NAME.fullmatch(name := str(path.parent.relative_to(folder))) and name != BUILT_IN_MODEL
        )
        if folder is not None and folder.is_dir()
        else []
    )
    return [BUILT_IN_MODEL, *local]


def plannable_models(settings: Settings) -> dict[str, tuple[KnownFrom, Architecture]]:
    """The models for which jobs can be planned without the hub, by name; unreadable folders are left out."""
    found = {name: _catalogue_entry(name) for name in catalogue.CATALOGUE}
    for name in local_names(settings):
        with contextlib.suppress(Unprocessable, OSError):
            source: KnownFrom = "built_in" if name == BUILT_IN_MODEL else "local"
            found[name] = source, find_for_planning(name, settings).architecture
    return dict(sorted(found.items()))


@cache
def _catalogue_entry(name: str) -> tuple[KnownFrom, Architecture]:
    return "catalogue", architectures.from_config(catalogue.CATALOGUE[name])


def _configs(folder: Path) -> list[Path]:
    """The config.json files of models in a folder and its subfolders; each real folder is visited once, and
    none that a link leads to elsewhere."""
    found: dict[Path, Path] = {}
    whole = folder.resolve()
    for path in (*folder.glob("*/config.json"), *folder.glob("*/*/config.json")):
        with contextlib.suppress(OSError, RuntimeError):
            if path.is_file() and path.parent.resolve().is_relative_to(whole):
                found.setdefault(path.parent.resolve(), path)
    return list(found.values())


def _local_config(name: str, settings: Settings) -> dict[str, Any] | None:
    folder = _local_folder(name, settings)
    return None if folder is None else _parse(name, _read_limited(name, folder / "config.json"))


def _local_folder(name: str, settings: Settings) -> Path | None:
    if settings.models_dir is None:
        return None
    try:
        folder = (settings.models_dir / name).resolve()
        inside = folder.is_relative_to(settings.models_dir.resolve())
        return folder if inside and (folder / "config.json").is_file() else None
    except (OSError, RuntimeError):  # circular links
        return None


def _hub_config(name: str, settings: Settings) -> tuple[dict[str, Any], str | None]:
    """The config of a model of the hub, and its commit, from the cache or by a request.

    Raises:
        Unprocessable: it cannot be read, or the hub does not provide it.
    """
    try:
        found = hub.cached(name) or hub.fetch(name, settings)
    except OSError as error:
        raise Unprocessable(
            f"The config.json of {name} cannot be read ({error.strerror}).", field="model_name"
        ) from None
    except hub.NotOnHub as error:
        unknown = _unknown(name, settings, str(error))
        raise (
            unknown if error.has_answered else hub.NotReadable(unknown.message, field=unknown.field)
        ) from None
    return _parse(name, found.content), found.commit


def _read_limited(name: str, path: Path) -> bytes:
    """The content of a file, up to one byte more than a config.json may have.

    Raises:
        Unprocessable: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise Unprocessable(
            f"The config.json of {name} cannot be read ({error.strerror}).", field="model_name"
        ) from None


def _unknown(name: str, settings: Settings, why: str) -> Unprocessable:
    where = (
        "in ACCRUE_MODELS_DIR" if settings.models_dir else "on this machine (ACCRUE_MODELS_DIR is not set)"
    )
    near = _near(name, [*local_names(settings), *catalogue.CATALOGUE])
    meant = f"Did you mean {near}? " if near not in (None, name) else ""
    known = catalogue.config_of(split_revision(name)[0]) is not None
    others = len(set(catalogue.CATALOGUE).difference(local_names(settings)))
    what = f"The weights of the model {name} are not" if known else f"The model {name} is not"
    return Unprocessable(
        f"{meant}{what} {where}, {why}. Put its folder (config.json, safetensors, "
        f"tokenizer) into ACCRUE_MODELS_DIR, or choose one of: {', '.join(local_names(settings)[:20])}. For "
        f"planning only, {others} more models are available: GET "
        "/gradient-accumulation/models, or accrue models.",
        field="model_name",
    )


def _near(name: str, names: Iterable[str]) -> str | None:
    """The most similar name, compared as a whole or by the part after the slash."""
    whole = {each.lower(): each for each in names}
    parts = {each.rpartition("/")[2]: each for each in reversed(whole)}
    near = get_close_matches(name.lower(), [*whole, *parts], n=1)
    return whole[parts.get(near[0], near[0])] if near else None


def _parse(name: str, content: bytes) -> dict[str, Any]:
    if len(content) > LARGEST_CONFIG_BYTES:
        raise Unprocessable(
            f"The config.json of {name} is larger than {LARGEST_CONFIG_BYTES} bytes.", field="model_name"
        )
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        raise Unprocessable(f"The config.json of {name} is not JSON.", field="model_name") from None
    if not isinstance(config, dict):
        raise Unprocessable(f"The config.json of {name} is not a JSON object.", field="model_name")
    why = size_error(config, most_fields=_MOST_CONFIG_FIELDS) or (
        "has a string with a NUL character" if path_to_unstorable(config) else None
    )
    if why is not None:
        raise Unprocessable(f"The config.json of {name} {why}.", field="model_name")
    return config


def _read(name: str, config: dict[str, Any]) -> PlannableModel:
    if config.get("quantization_config") is not None:
        raise Unprocessable(
            f"The weights of the model {name} are quantized already: choose the unquantized model.",
            field="model_name",
        )
    try:
        return PlannableModel(architectures.from_config(config), config)
    except UnknownArchitecture as error:
        raise Unprocessable(f"The model {name} cannot be planned for: {error}.", field="model_name") from None
