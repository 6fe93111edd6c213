"""Settings whose names are misspelled: they have no effect, and nothing else says so."""

import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from dotenv import dotenv_values

from app.settings import Settings

_PREFIX = "ACCRUE_"
_OTHERS = {"ACCRUE_URL", "ACCRUE_API_KEY", "ACCRUE_DATABASE_ADDRESS", "ACCRUE_PART"}
"""Variables that are no settings: of the accrue command, the compose file and trainers."""

_ALIKE = 0.85


def misspelled_settings() -> Iterator[str]:
    """A sentence for each environment variable and each line of .env that resembles a setting."""
    yield from misspelled({*os.environ, *dotenv_values(".env")})


def misspelled(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each name that resembles a setting, but is none."""
    known = {f"{_PREFIX}{field.upper()}" for field in Settings.model_fields}
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith(_PREFIX) or upper in known | _OTHERS:
            continue
        if alike := get_close_matches(upper, known, 1, _ALIKE):
            yield f"{name} is not a setting, and has no effect: did you mean {alike[0]}?"
