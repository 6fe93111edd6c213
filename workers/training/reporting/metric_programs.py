"""Metrics of the operator's own: programs that score how the model completes held-out prompts.

A program gets a line of JSON for each prompt on its standard input, with the fields `prompt`, `expected` and
`completion`, and prints a number. It runs in the trainer's sandbox, without a secret.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

SECONDS = 60.0
"""The time limit of a program."""


class Completed(NamedTuple):
    """A held-out prompt, its answer, and the model's."""

    prompt: str
    expected: str
    completion: str


class NotScored(Exception):
    """A program gave no number; the message says why, without what it has printed, which may be training
    text."""


def score(program: str, completed: Sequence[Completed]) -> float:
    """Runs a program, and returns the number that it prints.

    Args:
        program: the path of an executable file, or of a Python file.

    Raises:
        NotScored: it cannot be run, fails, takes too long, or prints something else.
    """
    lines = "".join(json.dumps(each._asdict()) + "\n" for each in completed)
    command = [sys.executable, program] if program.endswith(".py") else [program]
    try:
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotScored(f"it took more than {SECONDS:.0f} s") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotScored(f"it could not be run ({type(error).__name__})") from None
    if done.returncode:
        raise NotScored(f"it ended with status {done.returncode}")
    try:
        value = float(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise NotScored("it printed no number") from None
    if not math.isfinite(value):
        raise NotScored(f"it printed {value}")
    return value
