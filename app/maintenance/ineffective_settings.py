"""Settings that have no effect, and nothing else says so: their names are misspelled, or they are in .env but
only read from the environment."""

import os
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches

from dotenv import dotenv_values

from app.settings import Settings

_PREFIX = "ACCRUE_"
_OTHERS = {"ACCRUE_URL", "ACCRUE_API_KEY", "ACCRUE_DATABASE_ADDRESS", "ACCRUE_PART"}
"""Variables that are no settings: of the accrue command, the compose file and trainers."""

_ALIKE = 0.85

_OF_THE_ENVIRONMENT = (
    "ACCRUE_URL", "ACCRUE_API_KEY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip
"""Variables of the accrue command and of libraries, which do not read .env."""


def ineffective_settings() -> Iterator[str]:
    """A sentence for each environment variable and each line of .env that resembles a setting, and for each
    line of .env that only has an effect in the environment."""
    in_file = dotenv_values(".env")
    yield from misspelled({*os.environ, *in_file})
    yield from only_in_file(in_file, os.environ)


def only_in_file(in_file: Iterable[str], environment: Collection[str]) -> Iterator[str]:
    """A sentence for each name of a line of .env that has no effect there.

    Args:
        environment: the names of the environment's variables.
    """
    for name in sorted(in_file):
        if name.upper() in _OF_THE_ENVIRONMENT and name not in environment:
            yield f"{name} has no effect in .env: set it in the environment (export {name}=…)"


def misspelled(names: Iterable[str]) -> Iterator[str]:
    """A sentence for each name that resembles a setting, but is none."""
    known = {f"{_PREFIX}{field.upper()}" for field in Settings.model_fields}
    for name in sorted(names):
        upper = name.upper()
        if not upper.startswith(_PREFIX) or upper in known | _OTHERS:
            continue
        if alike := get_close_matches(upper, known, 1, _ALIKE):
            yield f"{name} is not a setting, and has no effect: did you mean {alike[0]}?"
