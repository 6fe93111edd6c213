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

TEXT_FAMILY = "text_family"
"""In the list: the family of the part of a config that describes the language model."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the sizes that it leaves out, at the top and in its part about text, and whether the
    output head is the embedding. A size that it gives under another name, or as null, is not added."""
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
    return found


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
