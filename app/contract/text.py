"""Checks that text can be stored in every supported database and encoded as UTF-8.

PostgreSQL stores no NUL character, and a lone surrogate cannot be encoded as UTF-8. Neither is ever
intended, so input with either of them is rejected. Uses only the standard library.
"""

import re
from typing import Any

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

MOST_FIELDS = 500
"""The most keys of one object in a request; no schema has half as many."""

MAX_DEPTH = 32

MAX_KEY_LENGTH = 100
"""The most characters of a key that an error message repeats."""


def is_storable(text: str) -> bool:
    """Whether a text has neither a NUL character nor a lone surrogate.

    >>> is_storable("a\\x00b")
    False
    """
    return (text.isascii() and "\x00" not in text) or _UNSTORABLE.search(text) is None


def storable(text: str) -> str:
    """The text, with U+FFFD in place of characters that cannot be stored."""
    return text if is_storable(text) else _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def storable_values(value: Any) -> Any:
    """Applies `storable` to every text within lists and objects."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable_values(key): storable_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [storable_values(each) for each in value]
    return value


def path_to_unstorable(value: Any, path: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The path to the first text in a nested value that cannot be stored; None if there is none."""
    if isinstance(value, str):
        return None if is_storable(value) else path
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str) and not is_storable(key):
                return (*path, storable(key)[:50])
            if (found := path_to_unstorable(each, (*path, str(key)[:MAX_KEY_LENGTH]))) is not None:
                return found
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            if (found := path_to_unstorable(each, (*path, str(number)))) is not None:
                return found
    return None


def size_error(value: Any, most_fields: int = MOST_FIELDS) -> str | None:
    """Why a value is too large or too deep to be validated; None if it is not."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        deeper = []
        for each in level:
            if isinstance(each, dict) and len(each) > most_fields:
                return f"has {len(each)} fields, more than {most_fields}"
            values = each.values() if isinstance(each, dict) else each
            deeper += [inner for inner in values if isinstance(inner, dict | list)]
        if not deeper:
            return None
        level = deeper
    return f"is nested deeper than {MAX_DEPTH} levels"
