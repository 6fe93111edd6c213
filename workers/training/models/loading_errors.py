"""Why transformers refuses a model, in a sentence for people."""

import json
from collections.abc import Mapping
from typing import Any

_LENGTH = 500

_ALL_MODEL_TYPES = " Should contain one of"
"""What precedes transformers' list of several hundred model types."""


def reason_of(error: Exception, config: Any = None, replaced: Mapping[str, str] | None = None) -> str:
    """The first two lines of an error of transformers or torch, at most 500 characters.

    A `KeyError` says only which value is unknown: with the model's configuration, the answer also says which
    field of config.json has that value.

    Args:
        config: the content of config.json, whatever it is.
        replaced: texts that the answer must not contain, such as paths, and what takes their place.
    """
    reason = _reason(error, config if isinstance(config, dict) else {})
    for text, instead in (replaced or {}).items():
        reason = reason.replace(text, instead)
    return reason[:_LENGTH]


def _reason(error: Exception, config: dict[str, Any]) -> str:
    if isinstance(error, KeyError) and error.args:
        unknown = error.args[0]
        field = _field_with(config, unknown)
        if field is not None:
            return f"transformers does not know {json.dumps(unknown)}, config.json's {field}"
        return f"KeyError: {unknown!r}"
    text = str(error).strip().split(_ALL_MODEL_TYPES)[0]
    lines = [line.strip() for line in text.split("\n")]
    return " ".join(lines[:2]) or type(error).__name__


def _field_with(config: dict[str, Any], value: object) -> str | None:
    """The dotted name of the field that has this value; None without one, or if the value is no text."""
    if not isinstance(value, str):
        return None
    for name, held in config.items():
        if held == value:
            return name
        if isinstance(held, dict) and (inner := _field_with(held, value)) is not None:
            return f"{name}.{inner}"
    return None
