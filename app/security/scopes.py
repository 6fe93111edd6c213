"""What a key may do."""

from typing import Literal, get_args

Scope = Literal["read", "write", "admin"]
"""read: look; write: change; admin: both, and see what was made with other keys."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
