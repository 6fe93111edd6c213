"""The requests of a sweep's jobs, one for each combination of the values that vary."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError

from app.errors import Unprocessable
from app.jobs.request_schemas import TrainingRequest
from app.sweeps.schemas import MAX_JOBS, SweepRequest

NAME_KEY, VALUES_KEY = "sweep", "sweep_values"
"""The metadata of a sweep's jobs: the sweep's name, and as JSON the job's values of the fields that vary."""

_PATHS = {
    "learning_rate": "training_config.learning_rate",
    "effective_batch_size": "target_effective_batch_size",
}
_LORA_RANK = "lora_rank"
_NOT_VARIED = ("name", "vary", "metadata", "dry_run")
_METADATA_KEYS, _METADATA_CHARACTERS = 16, 512


@dataclass(frozen=True)
class Variation:
    """A job of a sweep: its values of the fields that vary, and its request."""

    values: dict[str, Any]
    requested: TrainingRequest


def variations(swept: SweepRequest, name: str) -> list[Variation]:
    """The jobs of a sweep, the last field varying fastest.

    Raises:
        Unprocessable: there are too many jobs, a field does not exist, or a value is not allowed; the message
            names the values.
    """
    _check(swept)
    given = swept.model_dump(mode="json", exclude_unset=True, exclude={"name", "vary"})
    combinations = product(*swept.vary.values())
    return [_variation(given, dict(zip(swept.vary, values, strict=True)), name) for values in combinations]


def _check(swept: SweepRequest) -> None:
    count = prod(map(len, swept.vary.values()))
    if not 2 <= count <= MAX_JOBS:
        raise Unprocessable(
            f"vary: a sweep has 2 to {MAX_JOBS} jobs, and these values would give {count}.", field="vary"
        )
    paths = [_PATHS.get(field, field) for field in swept.vary]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise Unprocessable(f"vary: {twice} varies twice, under two names.", field="vary")
    for field, values in swept.vary.items():
        if field.partition(".")[0] in _NOT_VARIED:
            raise Unprocessable(f"vary.{field} cannot vary: choose another field.", field=f"vary.{field}")
        if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
            raise Unprocessable(f"vary.{field} has a value twice.", field=f"vary.{field}")
    if swept.dataset_config.file_id is None:
        raise Unprocessable(
            "A sweep's jobs share their data: upload it with POST /v1/files, and give its id.",
            field="dataset_config.file_id",
        )
    if {NAME_KEY, VALUES_KEY} & swept.metadata.keys() or len(swept.metadata) > _METADATA_KEYS - 2:
        raise Unprocessable(
            f"metadata: a sweep adds {NAME_KEY} and {VALUES_KEY}, so that at most {_METADATA_KEYS - 2} other "
            "keys are possible.",
            field="metadata",
        )


def _variation(given: Mapping[str, Any], values: dict[str, Any], name: str) -> Variation:
    request = deepcopy(dict(given))
    for field, value in values.items():
        if field == _LORA_RANK:
            _set_rank(request, value)
        else:
            _set(request, _PATHS.get(field, field), value, field)
    written = json.dumps(values)
    if len(written) > _METADATA_CHARACTERS:
        raise Unprocessable(
            f"vary: the values of a job have more than {_METADATA_CHARACTERS} characters.", field="vary"
        )
    request["metadata"] = {**request.get("metadata", {}), NAME_KEY: name, VALUES_KEY: written}
    try:
        return Variation(values, TrainingRequest.model_validate(request))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        why = "there is no such field" if first["type"] == "extra_forbidden" else why
        why = f"{at}: {why}" if at else why
        raise Unprocessable(f"With {described(values)}: {why}.", field="vary") from None


def _set(request: dict[str, Any], path: str, value: Any, field: str) -> None:
    *parents, last = path.split(".")
    place = request
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise Unprocessable(
                f"vary.{field}: {parent} is {json.dumps(inner)}, which has no such field.",
                field=f"vary.{field}",
            )
        place = inner
    place[last] = value


def _set_rank(request: dict[str, Any], rank: Any) -> None:
    training = request.setdefault("training_config", {})
    method = training.get("method", "full")
    if method in ("lora", "qlora"):
        method = {method: {}}
    if not isinstance(method, dict):
        raise Unprocessable(
            'vary.lora_rank needs training_config.method "lora" or "qlora".', field=f"vary.{_LORA_RANK}"
        )
    [(kind, options)] = method.items()
    training["method"] = {kind: {**options, "r": rank}}


def described(values: Mapping[str, Any]) -> str:
    """The values of a job, as people read them.

    >>> described({"learning_rate": 0.0001, "lora_rank": 8})
    'learning_rate 0.0001, lora_rank 8'
    """
    return ", ".join(
        f"{field} {value if isinstance(value, str) else json.dumps(value)}" for field, value in values.items()
    )
