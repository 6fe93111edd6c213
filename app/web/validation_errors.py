"""Translates pydantic's errors into messages with the client's field name and a suggested correction."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import AliasChoices, BaseModel

from app.contract.base import UNSTORABLE

_KIND = re.compile(r"int|str|bool|float|[A-Z]\w*")
_LONGEST_NAME = 100
"""The maximum number of characters of a field's name that are used; no schema's names are half as long."""

_MESSAGES = {"model_attributes_type": "expected a JSON object: send one, with Content-Type: application/json"}
"""Messages that replace pydantic's, by type of error."""

_FORMS = {
    "file_id": (
        "is not a file id: use an id like file-…, as returned by POST /v1/files and listed by GET /v1/files"
    ),
    "model": "has a form that is not allowed: use letters, digits, dots, hyphens and underscores, and a "
    "slash only between owner and name; for a revision on the hub, add @revision. To continue training a "
    "model that was trained here, give its name (ft:…, as GET /v1/models lists it), or the id of its job "
    "(ftjob-…)",
    "after": "is not an id in this list: give the last_id of the page before, or leave it out for the first",
}
_PATH_OF_A_MODEL = (
    "is a path: a model is named by its folder in ACCRUE_MODELS_DIR, the service's folder of base models; "
    "move or copy the model's folder there, and give name or owner/name"
)
_FIELD_FORMS = {"training_file": "file_id", "validation_file": "file_id", "validation_file_id": "file_id",
              "file_id": "file_id", "model": "model", "model_name": "model", "after": "after"}  # fmt: skip
"""For each field whose text must have a certain form: the key of its message in `_FORMS`."""

_FOREIGN_NAMES = {
    "lr": "learning_rate",
    "rank": "r",
    "lora_r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "batch_size": "target_effective_batch_size",
    "global_batch_size": "target_effective_batch_size",
    "target_batch": "target_effective_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "n_epochs": "epochs",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "seq_length": "max_length",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "dataset": "dataset_config",
    "model": "model_name",
}
"""Names that other trainers have for our fields."""

_FOREIGN_SWITCHES = {
    "use_peft": 'training_config.method: "lora"',
    "use_lora": 'training_config.method: "lora"',
    "peft_config": 'training_config.method: {"lora": {"r": 16, "alpha": 32}}',
    "load_in_4bit": 'training_config.method: "qlora"',
    "load_in_8bit": 'training_config.optimizer: "adamw_8bit", or training_config.method: "qlora"',
    "fp16": 'mixed_precision: "fp16"',
    "bf16": 'mixed_precision: "bf16"',
    "tf32": 'mixed_precision: "tf32"',
}
"""Our equivalents of other trainers' switches."""


_OTHER_KINDS = ("_type", "_parsing", "literal_error", "missing", "extra_forbidden")
"""Suffixes of pydantic's error types for values of the wrong type."""


MAX_REPORTED = 20
"""The maximum number of problems in one response: the client fixes them and repeats the request."""
_MAX_EXAMINED = 200


class FieldProblem(BaseModel):
    field: str
    message: str


def field_problems(
    errors: Sequence[Mapping[str, Any]], requested: type[BaseModel] | None
) -> list[FieldProblem]:
    """Translates pydantic's errors into one problem per field.

    Args:
        errors: pydantic's errors.
        requested: the model of the route's body.
    """
    by_field: dict[str, list[Mapping[str, Any]]] = {}
    found: dict[str, FieldProblem] = {}
    for error in errors[:_MAX_EXAMINED]:
        if error["loc"][:1] == ("header",):
            name = str(error["loc"][-1]).title()  # such as Idempotency-Key
            found[name] = FieldProblem(field=name, message=_message(error))
            continue
        by_field.setdefault(".".join(_until_a_union(error)) or "body", []).append(error)
    for field, own in by_field.items():
        problem = _of_one(own[0], requested) if len(own) == 1 else _of_a_union(field, own, requested)
        found.setdefault(problem.field, problem)
        if len(found) == MAX_REPORTED:
            break
    return list(found.values())


def _until_a_union(error: Mapping[str, Any]) -> list[str]:
    path = []
    for part in _path(error):
        if _is_member(part):
            break
        path.append(part)
    return path


def _is_member(part: str) -> bool:
    """Whether a part of an error's path is pydantic's name of a union member, not a field of the client's."""
    return "[" in part or "-" in part or _KIND.fullmatch(part) is not None


def _path(error: Mapping[str, Any]) -> list[str]:
    own = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    field_path = error["ctx"]["field"].split(".") if error["type"] == UNSTORABLE else []
    return [_shortened(part) for part in (*own, *field_path)]


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _of_a_union(
    field: str, errors: Sequence[Mapping[str, Any]], requested: type[BaseModel] | None
) -> FieldProblem:
    """The problem of a value that matches no type of a union: its error for the closest type, or else the
    list of possible types."""
    bounds = [error for error in errors if not error["type"].endswith(_OTHER_KINDS)]
    if bounds:  # the type is right, and the value is out of bounds
        return _of_one(bounds[0], requested)
    deepest = max(errors, key=lambda error: len(_path(error)))
    if (
        len(_path(deepest)) > field.count(".") + 3
    ):  # the path goes deeper than the field, the union member and its only field
        return _of_one(deepest, requested)
    simple = [error for error in errors if error["type"].endswith(("_type", "_parsing", "literal_error"))]
    messages = [_message(error) for error in simple if error["type"] != "model_type"] or [_message(errors[0])]
    start = "input should be "
    rest = [each.removeprefix(start) for each in messages if each.startswith(start)]
    return FieldProblem(field=field, message=start + " or ".join(rest) if rest else messages[0])


def _of_one(error: Mapping[str, Any], requested: type[BaseModel] | None) -> FieldProblem:
    if error["type"] == "json_invalid":
        return FieldProblem(field="body", message=f"is not valid JSON ({error['ctx']['error']})")
    path = [part for part in _path(error) if not _is_member(part)]
    field = ".".join(path) or "body"
    if error["type"] == "extra_forbidden":
        return FieldProblem(field=field, message=_unknown(field, requested))
    return FieldProblem(field=field, message=_message(error))


def _message(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        form = _FIELD_FORMS.get(_path(error)[-1], "")
        if form == "model" and _is_path(str(error["input"])):
            return _PATH_OF_A_MODEL
        return _FORMS.get(form, f"has a form that is not allowed: {message}")
    return _MESSAGES.get(error["type"], message[:1].lower() + message[1:])


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or "\\" in name


def _unknown(field: str, requested: type[BaseModel] | None) -> str:
    """The message for an unknown field, with the one that was probably meant."""
    message = "is not a field of this request"
    there = _fields_of(requested) if requested is not None else {}
    group, _, name = field.rpartition(".")
    first = next((path for path, others in there.items() if field in others), None)
    if first is not None:
        return f"is another name for {first}, which is also given: remove one"
    if name in _FOREIGN_SWITCHES and requested is not None:
        return f"{message}: use {_FOREIGN_SWITCHES[name]}"
    meant = _FOREIGN_NAMES.get(name, name)
    beside = [each for each in there if each.rpartition(".")[0] == group]
    named = [each for each in [*beside, *there] if each.rpartition(".")[2] == meant and each != field]
    if group and name in named[:1]:
        return f"{message}: {name} belongs at the top level of the request, not in {group}"
    names = {each.rpartition(".")[2]: each for each in beside}
    if group and not any(each in beside for each in named):  # such as n_epochs for epochs
        named = [names[each] for each in get_close_matches(name, names, n=1, cutoff=0.8)] or named
    near = named or [names[each] for each in get_close_matches(name, names, n=1, cutoff=0.7)]
    return f"{message}: did you mean {near[0]}?" if near else f"{message}: see /docs"


@cache
def _fields_of(model: type[BaseModel]) -> dict[str, list[str]]:
    """The aliases of a model's fields, by their paths."""
    return dict(_fields(model))


def _fields(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, list[str]]]:
    """The paths of a model's fields, parents before children, each with its aliases."""
    for name, field in model.model_fields.items():
        path, alias = f"{before}{name}", field.validation_alias
        names = alias.choices if isinstance(alias, AliasChoices) else []
        yield path, [f"{before}{other}" for other in names if other != name]
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _fields(member, f"{path}.")
