"""Ids that sort by the time of their creation."""

import secrets
import time
from typing import Literal

Kind = Literal[
    "ftjob",
    "file",
    "ftevent",
    "worker",
    "accumulation",
    "profile",
    "key",
    "audit",
    "evt",
    "preview",
    "sweep",
    "inference",
    "export",
]


def new_id(kind: Kind) -> str:
    """`ftjob-…`: 14 hexadecimal digits of microseconds since 1970, then 48 random bits.

    Ids of configurations start with `accumulation_`; all others have a hyphen.
    """
    separator = "_" if kind == "accumulation" else "-"
    return f"{kind}{separator}{time.time_ns() // 1000:014x}{secrets.token_hex(6)}"


def request_id() -> str:
    """An id for one request."""
    return f"req_{secrets.token_hex(8)}"
