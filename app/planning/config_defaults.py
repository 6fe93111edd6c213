"""Sizes that a config.json leaves out, because they are transformers' defaults for its family.

The service does not import transformers, so config_defaults.json lists them;
`python -m tests.harness.config_defaults` writes it, and a test compares it with the installed transformers.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from app.planning.estimated_sizes import SIZE_NAMES, TEXT_CONFIGS, TIED
from app.planning.parameter_count import TOWER_SIZE_NAMES, TOWERS

TEXT_FAMILY = "text_family"
"""In the list: the family of the part of a config that describes the language model."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the sizes that it leaves out, at the top and in its parts, and whether the output
    head is the embedding. A size that it gives under another name, or as null, is not added."""
    family = str(config.get("model_type"))
    text_family = _defaults().get(family, {}).get(TEXT_FAMILY)
    found = _with_sizes(config, family)
    for name in TEXT_CONFIGS:
        part = config.get(name)
        if isinstance(part, Mapping):
            tied = found.get(TIED)  # that of the whole model decides, even as its family's default, if true
            if not tied and TIED not in config:
                tied = part.get(TIED, tied)
            given = part if tied is None else {**part, TIED: tied}
            found[name] = _with_sizes(given, str(part.get("model_type") or text_family))
    for name in TOWERS:
        if isinstance(part := config.get(name), Mapping):
            found[name] = _with_tower_sizes(part, _defaults().get(family, {}).get(name, {}))
    return found


def _with_tower_sizes(part: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    added = {
        name: value
        for synonyms in TOWER_SIZE_NAMES
        if all(part.get(name) is None for name in synonyms)
        for name, value in defaults.items()
        if name in synonyms
    }
    return {**part, **added}


def _with_sizes(part: Mapping[str, Any], family: str) -> dict[str, Any]:
    added = {}
    for name, value in _defaults().get(family, {}).items():
        synonyms = next((names for names in SIZE_NAMES if name in names), ())
        known = name == TIED or bool(synonyms)
        if known and name not in part and all(part.get(other) is None for other in synonyms):
            added[name] = value
    return {**part, **added}


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """The defaults by family."""
    content = files(__package__).joinpath("config_defaults.json").read_text()
    found: dict[str, dict[str, Any]] = json.loads(content)
    return found
