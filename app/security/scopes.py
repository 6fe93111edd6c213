"""What a key may do."""

from typing import Literal, get_args

Scope = Literal["read", "write", "admin"]
"""read: may look; write: may change; admin: may do both, for the rows of all keys."""

SCOPES: tuple[Scope, ...] = get_args(Scope)


def lacks_scope(scope: Scope) -> str:
    """The message for a request whose key lacks a scope."""
    return (
        f"This key lacks the scope {scope}: create a key with accrue keys create NAME, which has the scopes "
        "read and write."
    )
