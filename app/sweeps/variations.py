"""The requests of a sweep's jobs, one for each combination of the values that vary."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from app.errors import Unprocessable
from app.jobs.request_schemas import TrainingRequest
from app.jobs.training_config import TrainingConfig
from app.sweeps.schemas import MAX_JOBS, SweepRequest

NAME_KEY, VALUES_KEY = "sweep", "sweep_values"
"""The metadata of a sweep's jobs: the sweep's name, and as JSON the job's values of the fields that vary."""

_PATHS = {
    "learning_rate": "training_config.learning_rate",
    "effective_batch_size": "target_effective_batch_size",
    "lora_rank": "training_config.method.lora.r",
}
"""Short names of fields, besides the aliases of the request itself."""

_METHOD = "method"
_NOT_VARIED = ("name", "vary", "metadata", "dry_run")
_METADATA_KEYS, _METADATA_CHARACTERS = 16, 512


def _aliases(model: type[BaseModel]) -> dict[str, str]:
    """The fields of a part of the request by their other names."""
    return {
        str(alias): name
        for name, field in model.model_fields.items()
        if isinstance(field.validation_alias, AliasChoices)
        for alias in field.validation_alias.choices
        if alias != name
    }


_ALIASES = {(): _aliases(TrainingRequest), ("training_config",): _aliases(TrainingConfig)}
"""The other names of fields, by where the fields are."""


@dataclass(frozen=True)
class Variation:
    """A job of a sweep: its values of the fields that vary, and its request."""

    values: dict[str, Any]
    requested: TrainingRequest


def variations(swept: SweepRequest, body: Mapping[str, Any], name: str) -> list[Variation]:
    """The jobs of a sweep, the last field varying fastest.

    Args:
        body: the request as the client sent it.

    Raises:
        Unprocessable: there are too many jobs, a field does not exist, or a value is not allowed; the message
            names the values.
    """
    _check(swept)
    given = {field: value for field, value in body.items() if field not in ("name", "vary", "dry_run")}
    chosen = product(*swept.vary.values())
    return [_variation(given, dict(zip(swept.vary, values, strict=True)), name) for values in chosen]


def _check(swept: SweepRequest) -> None:
    count = prod(map(len, swept.vary.values()))
    if not 2 <= count <= MAX_JOBS:
        raise Unprocessable(
            f"vary: a sweep has 2 to {MAX_JOBS} jobs, and these values would give {count}.", field="vary"
        )
    for field, values in swept.vary.items():
        if field.partition(".")[0] in _NOT_VARIED:
            raise Unprocessable(
                f"vary.{field} is the same for all jobs of a sweep: choose another field.",
                field=f"vary.{field}",
            )
        try:
            distinct = {json.dumps(_plain(value), sort_keys=True, allow_nan=False) for value in values}
        except ValueError:
            raise Unprocessable(
                f"vary.{field} has a number that is not finite.", field=f"vary.{field}"
            ) from None
        if len(distinct) < len(values):
            raise Unprocessable(f"vary.{field} has a value twice.", field=f"vary.{field}")
    for one, other in combinations(swept.vary, 2):
        if _overlap(one, other):
            raise Unprocessable(
                f"vary: {one} and {other} set the same thing: leave one out.", field=f"vary.{other}"
            )
    if {NAME_KEY, VALUES_KEY} & swept.metadata.keys() or len(swept.metadata) > _METADATA_KEYS - 2:
        raise Unprocessable(
            f"metadata: a sweep adds {NAME_KEY} and {VALUES_KEY}, so that at most {_METADATA_KEYS - 2} other "
            "keys are possible.",
            field="metadata",
        )


def _plain(value: Any) -> Any:
    """A value for comparison: a whole number is the same with a decimal point (0 and 0.0)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _path(field: str) -> list[str]:
    """Where a field is, by its own name."""
    *parents, last = _PATHS.get(field, field).split(".")
    return [*parents, _ALIASES.get(tuple(parents), {}).get(last, last)]


def _overlap(one: str, other: str) -> bool:
    """Whether one field is the other, or a part of it. The two kinds of adapters count as one."""
    first, second = (
        ["adapters" if part in ("lora", "qlora") else part for part in _path(field)] for field in (one, other)
    )
    length = min(len(first), len(second))
    return first[:length] == second[:length]


def _variation(given: Mapping[str, Any], values: dict[str, Any], name: str) -> Variation:
    request = deepcopy(dict(given))
    for field, value in values.items():
        _set(request, field, value)
    written = json.dumps(values)
    if len(written) > _METADATA_CHARACTERS:
        raise Unprocessable(
            f"vary: the values of a job have more than {_METADATA_CHARACTERS} characters.", field="vary"
        )
    request["metadata"] = {**request.get("metadata", {}), NAME_KEY: name, VALUES_KEY: written}
    try:
        requested = TrainingRequest.model_validate(request)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        why = "there is no such field" if first["type"] == "extra_forbidden" else why
        why = f"{at}: {why}" if at else why
        raise Unprocessable(f"With {described(values)}: {why}.", field="vary") from None
    if requested.dataset_config.file_id is None:
        raise Unprocessable(
            "A sweep's jobs use uploaded files: upload the data with POST /v1/files, and give its id.",
            field="dataset_config.file_id",
        )
    return Variation(values, requested)


def _set(request: dict[str, Any], field: str, value: Any) -> None:
    """Sets a field of a request, whatever the request has there."""
    *parents, last = _path(field)
    place = request
    for number, parent in enumerate(parents):
        inner = place.setdefault(parent, {})
        if parent == _METHOD:
            inner = _with_options(inner, field, kind=parents[number + 1] if number + 1 < len(parents) else "")
            place[parent] = inner
            if field == "lora_rank":  # that of the adapters which the request has, lora or qlora
                [place] = inner.values()
                break
        if not isinstance(inner, dict):
            raise Unprocessable(
                f"vary.{field}: {parent} is {json.dumps(inner)}, which has no such field.",
                field=f"vary.{field}",
            )
        place = inner
    for alias, name in _ALIASES.get(tuple(parents), {}).items():
        if name == last:
            place.pop(alias, None)
    place[last] = deepcopy(value)


def _with_options(method: Any, field: str, *, kind: str) -> dict[str, Any]:
    """A method as an object with its options, such as {"lora": {}} for "lora".

    Raises:
        Unprocessable: the request has another method, which has no such option.
    """
    if method in ("lora", "qlora"):
        method = {method: {}}
    is_object = isinstance(method, dict) and len(method) == 1
    known = ("lora", "qlora") if field == "lora_rank" else (kind,)
    if not is_object or not all(name in known and isinstance(own, dict) for name, own in method.items()):
        raise Unprocessable(
            f'vary.{field} needs training_config.method "{kind if field != "lora_rank" else "lora"}"'
            + (' or "qlora".' if field == "lora_rank" else "."),
            field=f"vary.{field}",
        )
    return dict(method)


def described(values: Mapping[str, Any]) -> str:
    """The values of a job, as people read them.

    >>> described({"learning_rate": 0.0001, "lora_rank": 8})
    'learning_rate 0.0001, lora_rank 8'
    """
    return ", ".join(
        f"{field} {value if isinstance(value, str) else json.dumps(value)}" for field, value in values.items()
    )
