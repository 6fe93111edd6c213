"""What a key may do."""

from typing import Literal, get_args

Scope = Literal["read", "write", "admin"]
"""read: may look; write: may change; admin: may do both, for the rows of all keys."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
